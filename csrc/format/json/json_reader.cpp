// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/json/json_reader.h"

#include "csrc/base/utf8.h"

namespace bytecheckpoint::format {

using base::Code;
using base::Status;
using base::text;

namespace {

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

void append_utf8(uint32_t code_point, std::string* out) {
  const auto put = [&](uint32_t byte) { out->push_back(static_cast<char>(byte)); };
  if (code_point < 0x80) return put(code_point);
  if (code_point < 0x800) {
    put(0xC0 | code_point >> 6);
  } else {
    if (code_point < 0x10000) {
      put(0xE0 | code_point >> 12);
    } else {
      put(0xF0 | code_point >> 18);
      put(0x80 | (code_point >> 12 & 0x3F));
    }
    put(0x80 | (code_point >> 6 & 0x3F));
  }
  put(0x80 | (code_point & 0x3F));
}

}  // namespace

Status JsonReader::fault(size_t position, std::string message) {
  return Status::make(Code::kCorrupt, std::move(message)).at(static_cast<int64_t>(position), 1);
}

Status JsonReader::wanted(std::string_view what) const {
  if (at_ >= text_.size()) return fault(at_, text("JSON: wanted ", what, ", but the text ends"));
  const char got = text_[at_];
  if (got >= ' ' && got <= '~') return fault(at_, text("JSON: wanted ", what, ", got '", std::string(1, got), "'"));
  return fault(at_, text("JSON: wanted ", what, ", got byte ", static_cast<int>(static_cast<unsigned char>(got))));
}

void JsonReader::skip_space() {
  while (at_ < text_.size() && std::string_view(" \t\n\r").find(text_[at_]) != std::string_view::npos) ++at_;
}

Status JsonReader::begin(char open, const char* what) {
  skip_space();
  if (peek() != open) return wanted(what);
  if (has_first_.size() == kMostLevels) return fault(at_, text("JSON: more than ", kMostLevels, " levels"));
  ++at_;
  has_first_.push_back(false);
  return Status::ok();
}

base::Result<bool> JsonReader::next(char close, const char* what) {
  skip_space();
  if (peek() == close) {
    ++at_;
    has_first_.pop_back();
    return false;
  }
  if (has_first_.back()) {
    if (peek() != ',') return wanted(text("',' or the end of ", what));
    ++at_;
  }
  has_first_.back() = true;
  return true;
}

base::Result<bool> JsonReader::next_key(std::string* key) {
  BCP_ASSIGN_OR_RETURN(const bool is_there, next('}', "an object"));
  if (!is_there) return false;
  BCP_ASSIGN_OR_RETURN(*key, string());
  skip_space();
  if (peek() != ':') return wanted("':'");
  ++at_;
  return true;
}

base::Result<std::string> JsonReader::string() {
  skip_space();
  if (peek() != '"') return wanted("a string");
  const size_t begin = at_++;
  std::string out;
  for (;;) {
    const size_t plain = at_;
    while (at_ < text_.size() && text_[at_] != '"' && text_[at_] != '\\' &&
           static_cast<unsigned char>(text_[at_]) >= ' ') {
      ++at_;
    }
    out.append(text_.substr(plain, at_ - plain));
    if (at_ >= text_.size() || static_cast<unsigned char>(text_[at_]) < ' ') return wanted("the end of a string");
    if (text_[at_++] == '"') break;
    BCP_RETURN_IF_ERROR(append_escape(&out));
  }
  if (!base::is_utf8(out)) return fault(begin, "JSON: a string is not UTF-8");
  return out;
}

Status JsonReader::append_escape(std::string* out) {
  constexpr std::string_view kEscapes = "\"\\/bfnrt", kMeanings = "\"\\/\b\f\n\r\t";
  const char escape = peek();
  const size_t known = kEscapes.find(escape);
  if (known != std::string_view::npos && escape != '\0') {
    ++at_;
    out->push_back(kMeanings[known]);
    return Status::ok();
  }
  if (escape != 'u') return wanted("an escape");
  ++at_;
  BCP_ASSIGN_OR_RETURN(uint32_t code_point, hex4());
  if (code_point >= 0xD800 && code_point < 0xE000) {  // half of a pair
    const size_t second = at_ + 2;
    if (code_point >= 0xDC00 || text_.substr(at_, 2) != "\\u") return wanted("the second half of a surrogate pair");
    at_ = second;
    BCP_ASSIGN_OR_RETURN(const uint32_t low, hex4());
    if (low < 0xDC00 || low >= 0xE000) return fault(second, "JSON: wanted the second half of a surrogate pair");
    code_point = 0x10000 + ((code_point - 0xD800) << 10) + (low - 0xDC00);
  }
  append_utf8(code_point, out);
  return Status::ok();
}

base::Result<uint32_t> JsonReader::hex4() {
  uint32_t value = 0;
  for (int i = 0; i < 4; ++i, ++at_) {
    const char c = peek();
    const char lower = static_cast<char>(c | 0x20);
    if (!is_digit(c) && (lower < 'a' || lower > 'f')) return wanted("four hex digits");
    value = 16 * value + static_cast<uint32_t>(is_digit(c) ? c - '0' : lower - 'a' + 10);
  }
  return value;
}

base::Result<int64_t> JsonReader::integer() {
  skip_space();
  const size_t begin = at_;
  const bool is_negative = peek() == '-';
  if (is_negative) ++at_;
  if (!is_digit(peek())) return wanted("an integer");
  const bool begins_with_zero = peek() == '0';
  int64_t value = 0;
  for (; is_digit(peek()); ++at_) {
    const int64_t digit = is_negative ? '0' - peek() : peek() - '0';
    if (__builtin_mul_overflow(value, int64_t{10}, &value) || __builtin_add_overflow(value, digit, &value)) {
      return fault(begin, "JSON: an integer has more than 64 bits");
    }
  }
  const size_t digits = at_ - begin - (is_negative ? 1 : 0);
  const bool goes_on = peek() == '.' || peek() == 'e' || peek() == 'E';
  if (goes_on || (begins_with_zero && digits > 1)) return fault(begin, "JSON: wanted an integer");
  return value;
}

Status JsonReader::skip_word(std::string_view word) {
  if (text_.substr(at_, word.size()) != word) return wanted("a value");
  at_ += word.size();
  return Status::ok();
}

base::Result<bool> JsonReader::boolean() {
  skip_space();
  const bool value = peek() == 't';
  if (!value && peek() != 'f') return wanted("true or false");
  BCP_RETURN_IF_ERROR(skip_word(value ? "true" : "false"));
  return value;
}

bool JsonReader::take_null() {
  skip_space();
  return peek() == 'n' && skip_word("null").is_ok();
}

Status JsonReader::skip_number() {
  const auto digits = [&] {
    const size_t begin = at_;
    while (is_digit(peek())) ++at_;
    return at_ - begin;
  };
  if (peek() == '-') ++at_;
  const bool begins_with_zero = peek() == '0';
  const size_t num_digits = digits();
  if (num_digits == 0 || (begins_with_zero && num_digits > 1)) return wanted("a value");
  if (peek() == '.') {
    ++at_;
    if (digits() == 0) return wanted("a digit");
  }
  if (peek() == 'e' || peek() == 'E') {
    ++at_;
    if (peek() == '+' || peek() == '-') ++at_;
    if (digits() == 0) return wanted("a digit");
  }
  return Status::ok();
}

Status JsonReader::skip() {
  skip_space();
  switch (peek()) {
    case '{': {
      BCP_RETURN_IF_ERROR(begin_object());
      for (std::string key;;) {
        BCP_ASSIGN_OR_RETURN(const bool is_there, next_key(&key));
        if (!is_there) return Status::ok();
        BCP_RETURN_IF_ERROR(skip());
      }
    }
    case '[': {
      BCP_RETURN_IF_ERROR(begin_array());
      for (;;) {
        BCP_ASSIGN_OR_RETURN(const bool is_there, next_element());
        if (!is_there) return Status::ok();
        BCP_RETURN_IF_ERROR(skip());
      }
    }
    case '"':
      return string().status();
    case 't':
      return skip_word("true");
    case 'f':
      return skip_word("false");
    case 'n':
      return skip_word("null");
    default:
      return skip_number();
  }
}

Status JsonReader::end() {
  skip_space();
  return at_ == text_.size() ? Status::ok() : wanted("the end of the text");
}

}  // namespace bytecheckpoint::format
