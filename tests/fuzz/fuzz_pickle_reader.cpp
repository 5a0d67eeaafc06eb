// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/pickle/pickle_reader.h"

#include <cstdlib>
#include <vector>

#include "csrc/base/utf8.h"
#include "tests/fuzz/peak_memory.h"
#include "tests/fuzz/targets.h"

namespace bytecheckpoint::fuzz {
namespace {

using namespace format;  // NOLINT
using Kind = PickleValue::Kind;

/// Walks the values of a pickle for a limited number of steps, because they may form a graph.
class Walk {
 public:
  Walk(std::string_view bytes, const Pickle& pickle) : bytes_(bytes), pickle_(pickle) {}

  std::string run() {
    left_.push_back(pickle_.root());
    for (size_t step = 0; step < 4 * bytes_.size() + 64 && !left_.empty(); ++step) {
      const PickleValue value = left_.back();
      left_.pop_back();
      BCP_ALL_HOLD(check(value));
    }
    return {};
  }

 private:
  std::string check(const PickleValue& value) {
    if (const std::string_view text = pickle_.text(value); !text.empty()) {
      BCP_HOLDS(text.data() >= bytes_.data() && text.data() + text.size() <= bytes_.data() + bytes_.size());
      BCP_HOLDS(!value.is(Kind::kString) || base::is_utf8(text));
    }
    const PickleSpan children = pickle_.children(value);
    BCP_HOLDS(!value.is(Kind::kDict) || children.size() % 2 == 0);
    for (const PickleValue& child : children) left_.push_back(child);
    if (const auto object = pickle_.object(value)) {
      BCP_HOLDS(value.is(Kind::kPersistent) || object->args.is(Kind::kTuple));
      left_.push_back(object->args);
      if (!object->state.is(Kind::kHole)) left_.push_back(object->state);
      if (!object->items.is(Kind::kHole)) left_.push_back(object->items);
    } else {
      BCP_HOLDS(!value.is(Kind::kHole));
    }
    return {};
  }

  std::string_view bytes_;
  const Pickle& pickle_;
  std::vector<PickleValue> left_;
};

/// A refusal names an opcode and a byte of the pickle.
std::string check_refusal(std::string_view bytes, const std::string& message) {
  const size_t at = message.find(" at byte ");
  BCP_HOLDS(message.rfind("pickle: ", 0) == 0 && at != message.npos);
  const unsigned long long offset = std::strtoull(message.c_str() + at + 9, nullptr, 10);
  BCP_HOLDS(offset <= bytes.size());
  return {};
}

std::string check(std::string_view bytes, const PickleRules& rules) {
  PeakMemory memory(bytes.size());
  const auto read = read_pickle(bytes, rules);
  BCP_ALL_HOLD(memory.stop());
  if (read.is_ok()) {
    BCP_HOLDS(read.value().end() <= bytes.size() && bytes[read.value().end() - 1] == '.');
    return Walk(bytes, read.value()).run();
  }
  const base::Code code = read.status().code();
  BCP_HOLDS(code == base::Code::kUnsupported || code == base::Code::kCorrupt);
  return check_refusal(bytes, read.status().message());
}

}  // namespace

/// Reads with all globals and persistent ids allowed, then also with standard types, then with no globals.
std::string pickle_reader(std::string_view bytes) {
  uint32_t names = 0;
  const PickleRules all{[&](std::string_view, std::string_view) { return std::make_optional(names++); }, true};
  const PickleRules standard{all.global, true, true};
  const PickleRules none{[](std::string_view, std::string_view) { return std::optional<uint32_t>(); }, false};
  BCP_ALL_HOLD(check(bytes, all));
  BCP_ALL_HOLD(check(bytes, standard));
  return check(bytes, none);
}

}  // namespace bytecheckpoint::fuzz
