// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/data_file.h"

#include "tests/fuzz/peak_memory.h"
#include "tests/fuzz/targets.h"

namespace bytecheckpoint::fuzz {
namespace {

using namespace format;  // NOLINT

std::string check_header(std::string_view bytes) {
  const auto id = decode_header(bytes);
  if (!id.is_ok()) return {};
  const auto again = decode_header(encode_header(id.value()));
  BCP_HOLDS(again.is_ok() && again.value().file_id == id.value().file_id);
  BCP_HOLDS(again.value().rank == id.value().rank && again.value().number == id.value().number);
  BCP_HOLDS(is_data_file_name(data_file_name(id.value())));
  return {};
}

std::string check_trailer(std::string_view bytes, int64_t file_bytes) {
  const auto decoded = decode_data_trailer(bytes, file_bytes);
  if (!decoded.is_ok()) return {};
  DataTrailer trailer = decoded.value();
  BCP_HOLDS(trailer.file_bytes() == file_bytes);
  BCP_HOLDS(trailer.end_of_records >= kHeaderBytes && trailer.table_bytes() >= 0);
  BCP_HOLDS(trailer.num_blocks == num_blocks_of(trailer.end_of_records));
  const auto again = decode_data_trailer(encode_data_trailer(&trailer), file_bytes);
  BCP_HOLDS(again.is_ok() && again.value().table_crc == decoded.value().table_crc);
  return {};
}

/// A name that is accepted as ours is short and without '/' and NUL, so it names nothing outside the directory.
std::string check_name(std::string_view name) {
  if (!is_data_file_name(name)) return {};
  BCP_HOLDS(name.find('/') == name.npos && name.find('\0') == name.npos && name.size() < 64);
  return {};
}

}  // namespace

/// Tests the bytes as a file, their end as a trailer, and all of them as a table and as a name.
std::string data_file(std::string_view bytes) {
  const auto size = static_cast<int64_t>(bytes.size());
  const auto last = static_cast<size_t>(std::min(size, kDataTrailerBytes));
  PeakMemory memory(bytes.size());
  BCP_ALL_HOLD(check_header(bytes.substr(0, kHeaderBytes)));
  BCP_ALL_HOLD(check_trailer(bytes.substr(bytes.size() - last), size));
  BCP_ALL_HOLD(check_name(bytes));
  const std::string_view table = bytes.substr(0, bytes.size() / 4 * 4);
  BCP_HOLDS(encode_block_table(decode_block_table(table)) == table);
  return memory.stop();
}

}  // namespace bytecheckpoint::fuzz
