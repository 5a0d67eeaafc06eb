// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "csrc/base/bytes.h"
#include "csrc/base/status.h"
#include "csrc/format/pickle/pickle_reader.h"
#include "csrc/format/pickle/pickle_values.h"

namespace bytecheckpoint::format {

/// Numbers the globals of one pickle, of which all are accepted: those of `find_standard_global` as it does, others
/// from kFirstOther on. Views into the pickle, which must outlive it.
class GlobalNames {
 public:
  using Name = std::pair<std::string_view, std::string_view>;  // module and name
  static constexpr uint32_t kFirstOther = 1 << 16;

  uint32_t number_of(std::string_view module, std::string_view name);
  /// Returns the name under which the pickle has a global. \param number  That `number_of` returned.
  const Name& name_of(uint32_t number) const { return names_.at(number); }
  /// Returns `module.name`.
  std::string text_of(uint32_t number) const;
  /// Returns rules that accept every global and everything that standard types need.
  PickleRules rules();

 private:
  std::map<Name, uint32_t> others_;  // ordered, because chosen names could make hashing slow
  std::unordered_map<uint32_t, Name> names_;
};

/// Copies values of a pickle, each into a pickle of its own that makes the same value. Nothing is run: opcodes are
/// copied, with the references that the copy needs.
class PickleCopier {
 public:
  /// \param bytes  What `pickle` was read from, with the rules of `names`. All must outlive the copier.
  PickleCopier(std::string_view bytes, const Pickle& pickle, const GlobalNames& names)
      : bytes_(bytes), pickle_(pickle), names_(names) {}

  /// \param most_bytes  Largest copy that is made.
  /// \returns kUnsupported, with the reason, for a value that holds tensors, one nested deeper than kMaxTreeDepth, and
  /// a copy beyond `most_bytes`. Time and memory are in proportion to the copy.
  base::Result<std::string> copy(const PickleValue& value, size_t most_bytes);

 private:
  base::Status write(const PickleValue& value, int depth);
  base::Status write_object(const PickleValue& value, int depth);
  base::Status write_children(const PickleValue& value, int depth);
  base::Status write_global(uint32_t number);
  /// Copies the opcode at byte `at`, with its operand.
  void write_scalar(uint32_t at);
  /// Pushes a value that was written before. \returns whether it was.
  bool recall(uint64_t key);
  void memoise(uint64_t key);

  const std::string_view bytes_;
  const Pickle& pickle_;
  const GlobalNames& names_;
  base::ByteWriter out_;
  size_t most_bytes_ = 0;
  std::unordered_map<uint64_t, uint32_t> memo_;
};

}  // namespace bytecheckpoint::format
