// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/pickle/pickle_writer.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "csrc/base/utf8.h"

namespace bytecheckpoint::format {
namespace {

constexpr size_t kMaxIntegerBytes = 10;

/// Writes an opcode and its operand. \returns the number of bytes.
size_t put_integer(int64_t value, char* out) {
  const auto put = [&](char opcode, size_t size) {
    out[0] = opcode;
    std::memcpy(out + 1, &value, size);  // little-endian two's complement, cut to what holds the value
    return 1 + size;
  };
  if (value >= 0 && value <= 0xFF) return put('K', 1);
  if (value >= 0 && value <= 0xFFFF) return put('M', 2);
  if (value >= INT32_MIN && value <= INT32_MAX) return put('J', 4);
  // LONG1: 8 bytes hold every int64.
  out[0] = static_cast<char>(0x8A);
  out[1] = 8;
  std::memcpy(out + 2, &value, 8);
  return kMaxIntegerBytes;
}

}  // namespace

PickleWriter::PickleWriter(int protocol) : protocol_(protocol) {
  out_.u8(0x80);
  out_.u8(static_cast<uint8_t>(protocol));
}

void PickleWriter::integer(int64_t value) {
  char opcode[kMaxIntegerBytes];
  out_.raw(opcode, put_integer(value, opcode));
}

int64_t PickleWriter::integer_bytes(int64_t value) {
  if (value >= 0 && value <= 0xFF) return 2;
  if (value >= 0 && value <= 0xFFFF) return 3;
  return value >= INT32_MIN && value <= INT32_MAX ? 5 : kMaxIntegerBytes;
}

void PickleWriter::real(double value) {
  out_.u8('G');
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits = __builtin_bswap64(bits);  // BINFLOAT is the one big-endian field of the protocol
  out_.u64(bits);
}

void PickleWriter::write_string(std::string_view value) {
  if (protocol_ >= 4 && value.size() <= 0xFF) {
    out_.u8(0x8C);
    out_.u8(static_cast<uint8_t>(value.size()));
  } else if (value.size() <= 0xFFFFFFFFu) {
    out_.u8('X');
    out_.u32(static_cast<uint32_t>(value.size()));
  } else {
    out_.u8(0x8D);
    out_.u64(value.size());
  }
  out_.raw(value);
}

uint32_t PickleWriter::string(std::string_view value) {
  if (protocol_ < 4) {
    write_string(value);
    return 0;
  }
  const auto is_same = [&](uint32_t index) {
    return std::string_view(out_.bytes()).substr(strings_[index].at, strings_[index].size) == value;
  };
  const auto recall_known = [&](uint32_t index) {
    next_known_ = index + 1;
    get(strings_[index].number);
    return strings_[index].number;
  };
  // The names of a state come twice in the same order, so the string behind the last one found is tried first.
  if (next_known_ < strings_.size() && is_same(next_known_)) return recall_known(next_known_);
  const uint64_t hash = std::hash<std::string_view>()(value);
  const uint32_t known = string_table_.find(hash, is_same);
  if (known != base::IndexTable::kNone) return recall_known(known);
  write_string(value);
  string_table_.insert(hash, static_cast<uint32_t>(strings_.size()));
  const size_t at = out_.size() - value.size();
  strings_.push_back({at, value.size(), memoise_top()});
  return strings_.back().number;
}

void PickleWriter::bytes(std::string_view value) {
  if (protocol_ < 3) {
    global("_codecs", "encode");
    string(base::latin1_to_utf8(value));
    string("latin1");
    out_.u8(0x86);  // TUPLE2
    return reduce();
  }
  out_.u8('B');
  out_.u32(static_cast<uint32_t>(value.size()));
  out_.raw(value);
}

void PickleWriter::global(std::string_view module, std::string_view name) {
  if (protocol_ < 4) {
    out_.u8('c');
    out_.raw(module);
    out_.u8('\n');
    out_.raw(name);
    out_.u8('\n');
    return;
  }
  std::string key = base::text("g:", module, ":", name);
  if (recall(key)) return;
  string(module);
  string(name);
  out_.u8(0x93);
  memoise(std::move(key));
}

void PickleWriter::int_tuple(const tensor::Dims& values) {
  if (values.empty()) return empty_tuple();
  if (values.size() > 3) mark();
  // Appends several ints at a time, because a manifest has millions of tuples.
  char opcodes[4 * kMaxIntegerBytes];
  size_t used = 0;
  for (int64_t value : values) {
    used += put_integer(value, opcodes + used);
    if (used <= sizeof opcodes - kMaxIntegerBytes) continue;
    out_.raw(opcodes, std::exchange(used, 0));
  }
  out_.raw(opcodes, used);
  if (values.size() > 3) {
    tuple_from_mark();
  } else {
    out_.u8(static_cast<uint8_t>(0x84 + values.size()));  // TUPLE1..TUPLE3
  }
}

int64_t PickleWriter::int_tuple_bytes(const tensor::Dims& values) {
  int64_t bytes = values.size() > 3 ? 2 : 1;
  for (int64_t value : values) bytes += integer_bytes(value);
  return bytes;
}

void PickleWriter::tree(const Tree& value) {
  TreeReader in(value);
  tree_node(&in);
}

void PickleWriter::tree_node(TreeReader* in) {
  const TreeNode node = in->next();
  const auto children = [&] {
    for (uint32_t i = 0; i < node.num_children; ++i) tree_node(in);
  };
  switch (node.kind) {
    case Tree::Kind::kNone:
      return none();
    case Tree::Kind::kFalse:
      return boolean(false);
    case Tree::Kind::kTrue:
      return boolean(true);
    case Tree::Kind::kInt:
      return integer(node.integer);
    case Tree::Kind::kFloat:
      return real(node.real);
    case Tree::Kind::kString:
      string(node.text);
      return;
    case Tree::Kind::kBytes:
      return bytes(node.text);
    case Tree::Kind::kTuple:
      if (node.num_children == 0) return empty_tuple();
      mark();
      children();
      return tuple_from_mark();
    case Tree::Kind::kList:
      empty_list();
      mark();
      children();
      return append_items();
    case Tree::Kind::kDict:
      empty_dict();
      mark();
      children();
      return set_items();
  }
}

void PickleWriter::get(uint32_t number) {
  if (number <= 0xFF) {
    out_.u8('h');
    out_.u8(static_cast<uint8_t>(number));
  } else {
    out_.u8('j');
    out_.u32(number);
  }
}

bool PickleWriter::recall(const std::string& key) {
  const auto found = others_.find(key);
  if (found == others_.end()) return false;
  get(found->second);
  return true;
}

void PickleWriter::memoise(std::string key) {
  others_.emplace(std::move(key), memoise_top());
}

/// MEMOIZE stores under the number of entries that the memo has.
uint32_t PickleWriter::memoise_top() {
  out_.u8(0x94);
  return num_memoised_++;
}

std::string PickleWriter::finish() {
  out_.u8('.');
  return out_.take();
}

}  // namespace bytecheckpoint::format
