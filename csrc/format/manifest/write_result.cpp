// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/manifest/write_result.h"

namespace bytecheckpoint::format {
namespace {

void encode_dims(const tensor::Dims& dims, base::ByteWriter* out) {
  for (int64_t value : dims) out->i64(value);
}

tensor::Dims decode_dims(size_t count, base::ByteReader* in) {
  tensor::Dims dims(count);
  for (int64_t& value : dims) value = in->i64();
  return dims;
}

}  // namespace

std::string encode_write_result(const WriteResult& result) {
  base::ByteWriter out;
  out.u32(static_cast<uint32_t>(result.files.size()));
  for (const FileEntry& file : result.files) {
    out.u32(file.id.rank);
    out.u32(file.id.number);
    out.id(file.id.file_id);
    out.i64(file.bytes);
    out.u32(file.trailer_crc);
  }
  out.u32(static_cast<uint32_t>(result.records.size()));
  for (const WrittenRecord& written : result.records) {
    out.string(written.fqn);
    out.u8(static_cast<uint8_t>(written.box.num_dims()));
    encode_dims(written.box.offsets, &out);
    encode_dims(written.box.sizes, &out);
    out.u8(static_cast<uint8_t>(written.record.kind));
    out.u8(static_cast<uint8_t>(written.record.stored_dtype));
    out.u32(written.record.file);
    out.i64(written.record.offset);
    out.i64(written.record.bytes);
    out.i64(written.record.data_offset);
    out.i64(written.record.data_bytes);
  }
  return out.take();
}

base::Result<WriteResult> decode_write_result(std::string_view bytes) {
  base::ByteReader in(bytes);
  WriteResult result;
  for (uint32_t count = in.u32(); count != 0 && in.ok(); --count) {
    FileEntry& file = result.files.emplace_back();
    file.id.rank = in.u32();
    file.id.number = in.u32();
    file.id.file_id = in.id();
    file.bytes = in.i64();
    file.trailer_crc = in.u32();
    file.name = data_file_name(file.id);
  }
  for (uint32_t count = in.u32(); count != 0 && in.ok(); --count) {
    WrittenRecord& written = result.records.emplace_back();
    written.fqn = in.string();
    const size_t num_dims = in.u8();
    written.box.offsets = decode_dims(num_dims, &in);
    written.box.sizes = decode_dims(num_dims, &in);
    written.record.kind = static_cast<RecordKind>(in.u8());
    written.record.stored_dtype = static_cast<tensor::DType>(in.u8());
    written.record.file = in.u32();
    if (written.record.file >= result.files.size()) in.fail();
    written.record.offset = in.i64();
    written.record.bytes = in.i64();
    written.record.data_offset = in.i64();
    written.record.data_bytes = in.i64();
  }
  if (!in.ok() || in.remaining() != 0) {
    return base::Status::make(base::Code::kCorrupt,
                              base::text("result of a rank: damaged in transit at byte ", in.position()));
  }
  return result;
}

}  // namespace bytecheckpoint::format
