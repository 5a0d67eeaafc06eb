// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/pickle/pickle_values.h"

#include <algorithm>
#include <cstring>

#include "csrc/base/bytes.h"
#include "csrc/format/pickle/pickle_opcodes.h"

namespace bytecheckpoint::format {
namespace {

using Kind = PickleValue::Kind;

bool is_list(const PickleValue& value) {
  return value.is(Kind::kList) || value.is(Kind::kDict) || value.is(Kind::kSet);
}

}  // namespace

const PickleValue& PickleSpan::operator[](size_t i) const {
  uint32_t first = first_, next = next_;
  for (size_t run = run_; i >= run;) {
    i -= run;
    const PickleCell::Link link = (*cells_)[next].link;
    first = next + 1, run = link.count, next = link.other;
  }
  return (*cells_)[first + i].value;
}

PickleValue PickleArena::add_tuple(Stack* stack, size_t first) {
  const auto count = static_cast<uint32_t>(stack->size() - first);
  if (count == 0) return PickleValue(Kind::kTuple);
  const uint32_t at = next_cell();
  if (count >= kManyElements) cells_.push_back(PickleCell(count, 0));
  stack->move_tail(first, &cells_);
  return PickleValue(Kind::kTuple, at, std::min(count, kManyElements));
}

PickleValue PickleArena::add_frozen_set(Stack* stack, size_t first) {
  PickleValue value = add_tuple(stack, first);
  value.kind = Kind::kFrozenSet;
  return value;
}

void PickleArena::share(PickleValue* value) {
  if (!is_list(*value) || value->at != 0) return;
  value->at = next_cell();
  cells_.push_back(PickleCell());
}

void PickleArena::extend(PickleValue* list, Stack* stack, size_t first) {
  const auto count = static_cast<uint32_t>(stack->size() - first);
  if (count == 0) return;
  share(list);
  const uint32_t last = cells_[list->at].link.other, end = next_cell();
  if (last != 0 && last + 1 + cells_[last].link.count == end) {
    cells_[last].link.count += count;
  } else {
    const uint32_t next = last == 0 ? end : cells_[last].link.other;
    cells_.push_back(PickleCell(count, next));
    if (last != 0) cells_[last].link.other = end;
    cells_[list->at].link.other = end;
  }
  cells_[list->at].link.count += count;
  stack->move_tail(first, &cells_);
}

PickleValue PickleArena::add_object(Kind kind, uint32_t global, const PickleValue& args) {
  const uint32_t at = next_cell();
  cells_.push_back(PickleCell(PickleValue(Kind::kGlobal, global)));
  cells_.push_back(PickleCell(args));
  cells_.push_back(PickleCell(PickleValue()));
  cells_.push_back(PickleCell(PickleValue()));
  return PickleValue(kind, at);
}

bool PickleArena::fill(const PickleValue& object, Kind kind, Stack* stack, size_t first) {
  PickleValue items = cells_[object.at + 3].value;
  if (items.is(Kind::kHole)) items = PickleValue(kind);
  if (!items.is(kind)) return false;
  extend(&items, stack, first);
  cells_[object.at + 3].value = items;
  return true;
}

PickleValue PickleArena::add_persistent(const PickleValue& id) {
  const uint32_t at = next_cell();
  cells_.push_back(PickleCell(id));
  return PickleValue(Kind::kPersistent, at);
}

PickleSpan PickleArena::children(const PickleValue& value) const {
  if (value.is(Kind::kTuple) || value.is(Kind::kFrozenSet)) {
    const bool many = value.size == kManyElements;
    const uint32_t count = many ? cells_[value.at].link.count : value.size;
    return {cells_, value.at + (many ? 1 : 0), count, 0, count};
  }
  if (!is_list(value) || value.at == 0) return {};
  const PickleCell::Link all = cells_[value.at].link;
  if (all.count == 0) return {};
  const uint32_t first = cells_[all.other].link.other;
  const PickleCell::Link run = cells_[first].link;
  return {cells_, first + 1, run.count, run.other, all.count};
}

std::optional<PickleObject> PickleArena::object(const PickleValue& value) const {
  if (value.is(Kind::kPersistent)) return PickleObject{0, cells_[value.at].value, {}, {}};
  if (!value.is(Kind::kObject) && !value.is(Kind::kCall)) return std::nullopt;
  return PickleObject{cells_[value.at].value.global(), cells_[value.at + 1].value, cells_[value.at + 2].value,
                      cells_[value.at + 3].value};
}

int64_t Pickle::integer(const PickleValue& value) const {
  base::ByteReader in(bytes_.substr(value.at));
  const auto opcode = static_cast<Opcode>(in.u8());
  return *read_int_operand(opcode, &in);
}

double Pickle::real(const PickleValue& value) const {
  base::ByteReader in(bytes_.substr(value.at + 1));
  const uint64_t bits = __builtin_bswap64(in.u64());  // the one big-endian field of the protocol
  double number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

std::string_view Pickle::text(const PickleValue& value) const {
  const bool has_text =
      value.is(Kind::kString) || value.is(Kind::kBytes) || value.is(Kind::kByteArray) || value.is(Kind::kLong);
  return has_text ? text_at(bytes_, value.at) : std::string_view();
}

std::optional<PickleObject> Pickle::object(const PickleValue& value, Kind kind, uint32_t global) const {
  std::optional<PickleObject> found;
  if (value.is(kind)) found = object(value);
  if (found.has_value() && found->global != global) found.reset();
  return found;
}

std::string_view text_at(std::string_view pickle, uint32_t at) {
  base::ByteReader in(pickle.substr(at));
  const auto opcode = static_cast<Opcode>(in.u8());
  return read_text_operand(opcode, &in);
}

}  // namespace bytecheckpoint::format
