// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "csrc/base/bytes.h"
#include "csrc/base/index_table.h"
#include "csrc/format/tree.h"
#include "csrc/tensor/box.h"

namespace bytecheckpoint::format {

/// Writes pickle opcodes; each method writes one opcode, or a common group. It does not check that they make sense: the
/// caller is responsible for their order.
///
/// With protocol 4, strings and globals are memoised by content, which keeps metadata of many records small. Protocol
/// 2, which all versions of `torch.load(weights_only=True)` accept, is written without a memo, because records are
/// tiny.
class PickleWriter {
 public:
  /// \param protocol  2 or 4.
  explicit PickleWriter(int protocol);
  /// Reserves memory for `bytes` in all. Memory that is not used is never touched.
  void reserve(size_t bytes) { out_.reserve(bytes); }

  void none() { out_.u8('N'); }
  void boolean(bool value) { out_.u8(value ? 0x88 : 0x89); }
  void integer(int64_t value);
  void real(double value);
  /// \returns the number in the memo, for `get`; with protocol 2, which has no memo, 0.
  uint32_t string(std::string_view value);
  /// Protocol 2 has no opcode for bytes. As Python does, it writes them as a call of `_codecs.encode` on text.
  void bytes(std::string_view value);
  void global(std::string_view module, std::string_view name);

  void mark() { out_.u8('('); }
  void tuple_from_mark() { out_.u8('t'); }
  void empty_tuple() { out_.u8(')'); }
  void empty_list() { out_.u8(']'); }
  void empty_dict() { out_.u8('}'); }
  void tuple1() { out_.u8(0x85); }
  void reduce() { out_.u8('R'); }
  void new_object() { out_.u8(0x81); }
  void build() { out_.u8('b'); }
  void set_items() { out_.u8('u'); }
  void append_items() { out_.u8('e'); }
  void persistent_id() { out_.u8('Q'); }

  /// Writes ints as one tuple.
  void int_tuple(const tensor::Dims& values);
  /// Return how many bytes `integer` and `int_tuple` write.
  static int64_t integer_bytes(int64_t value);
  static int64_t int_tuple_bytes(const tensor::Dims& values);
  /// Writes a tree of builtin values.
  void tree(const Tree& value);
  /// Pushes the value that has this number in the memo.
  void get(uint32_t number);
  /// Pushes the value that was memoised under `key`. \returns false, and writes nothing, if there is none.
  bool recall(const std::string& key);
  /// Memoises the top of the stack under `key`.
  void memoise(std::string key);

  /// Writes what `emit()` writes, which must be the same each time. While `*phrase` is empty it calls `emit`, and keeps
  /// the bytes; afterwards it copies them. The kept bytes are those of a second call, so they recall what the first
  /// call memoised.
  template <class Emit>
  void repeat(std::string* phrase, Emit&& emit) {
    if (!phrase->empty()) return out_.raw(*phrase);
    emit();
    const size_t end = out_.size();
    emit();
    *phrase = out_.bytes().substr(end);
    out_.truncate(end);
  }

  /// Ends the pickle with STOP and returns it. The writer must not be used afterwards.
  std::string finish();

 private:
  /// A string that was written, and is in `out_`.
  struct MemoString {
    size_t at;
    size_t size;
    uint32_t number;
  };

  void write_string(std::string_view value);
  uint32_t memoise_top();
  /// Writes the next value, with its children.
  void tree_node(TreeReader* in);

  const int protocol_;
  base::ByteWriter out_;
  uint32_t num_memoised_ = 0;
  // Strings by their content, because metadata have a million of them; all else by a key.
  std::vector<MemoString> strings_;
  base::IndexTable string_table_;
  uint32_t next_known_ = 0;  // behind the string that was found last
  std::unordered_map<std::string, uint32_t> others_;
};

}  // namespace bytecheckpoint::format
