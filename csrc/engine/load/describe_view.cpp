// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/load/describe_view.h"

#include "csrc/base/bytes.h"

namespace bytecheckpoint::engine {
namespace {

class Describer {
 public:
  explicit Describer(base::ByteWriter* out) : out_(*out) {}

  void item(const format::Item& item, const std::vector<RecordView>& views) {
    out_.string(item.fqn);
    out_.u8(item.is_tensor ? 1 : 0);
    dtype(item.tensor.dtype);
    dims(item.tensor.sizes);
    chunks(item.chunks, views);
  }

 private:
  void chunks(const std::vector<format::Chunk>& chunks, const std::vector<RecordView>& views) {
    out_.u64(chunks.size());
    out_.u64(views.size());
    for (const format::Chunk& chunk : chunks) {
      box(chunk.box);
      const format::Record& record = chunk.record;
      out_.u8(static_cast<uint8_t>(record.kind));
      dtype(record.stored_dtype);
      out_.u32(record.file);
      for (const int64_t number : {record.offset, record.bytes, record.data_offset, record.data_bytes}) {
        out_.i64(number);
      }
    }
    for (const RecordView& view : views) record_view(view);
  }

  void record_view(const RecordView& view) {
    dims(view.record_sizes);
    out_.i64(view.offset);
    dims(view.strides);
    out_.u8(view.quantized != nullptr ? 1 : 0);
    if (view.quantized != nullptr) quantized(*view.quantized);
  }

  void quantized(const QuantizedChunk& chunk) {
    box(chunk.box.box);
    out_.i64(chunk.box.offset);
    dims(chunk.box.strides);
    const Dequantization& how = *chunk.how;
    for (const tensor::DType each : {how.codes, how.stored, how.values, how.scale_dtype}) dtype(each);
    dims(how.block);
    dims(how.scale_sizes);
    chunks(how.scale_chunks, how.scale_views);
  }

  void box(const tensor::Box& box) {
    dims(box.offsets);
    dims(box.sizes);
  }

  void dims(const tensor::Dims& dims) {
    out_.u64(dims.size());
    for (const int64_t dim : dims) out_.i64(dim);
  }

  void dtype(tensor::DType dtype) { out_.u8(static_cast<uint8_t>(dtype)); }

  base::ByteWriter& out_;
};

}  // namespace

void describe_view(const CheckpointView& view, const std::function<void(std::string_view)>& sink) {
  const std::vector<format::Item>& items = view.manifest.items;
  for (size_t i = 0; i < items.size(); ++i) {
    base::ByteWriter out;
    Describer(&out).item(items[i], view.record_views[i]);
    out.u8(view.is_padded[i] ? 1 : 0);
    sink(out.bytes());
  }
}

}  // namespace bytecheckpoint::engine
