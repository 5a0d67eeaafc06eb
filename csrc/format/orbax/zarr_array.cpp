// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/orbax/zarr_array.h"

#include <algorithm>
#include <optional>

#include "csrc/base/bytes.h"
#include "csrc/format/json/json_reader.h"
#include "csrc/tensor/box.h"

namespace bytecheckpoint::format {
namespace {

using base::Code;
using base::Status;
using base::text;

constexpr int64_t kMostChunks = 1 << 24;  // of an array, which each have a file
constexpr int64_t kMostPieces = 1 << 20;  // of a file
constexpr int64_t kIndexEntryBytes = 16, kCrcBytes = 4;

Status unsupported(std::string_view what, std::string_view got) {
  return Status::make(Code::kUnsupported, text("an array of zarr with ", what, " '", got, "', which is not read here"));
}

/// CRC-32C, bit by bit: an index is short.
uint32_t crc32c(std::string_view bytes) {
  constexpr uint32_t kPolynomial = 0x82F63B78;
  uint32_t crc = ~0U;
  for (const char byte : bytes) {
    crc ^= static_cast<unsigned char>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
  }
  return ~crc;
}

Status read_dims(JsonReader* in, tensor::Dims* dims) {
  constexpr size_t kMostDims = 64;
  *dims = {};
  return in->array([&]() -> Status {
    BCP_ASSIGN_OR_RETURN(const int64_t size, in->integer());
    if (size < 0 || dims->size() == kMostDims) return JsonReader::fault(in->position(), "no shape of an array");
    dims->push_back(size);
    return Status::ok();
  });
}

Status read_string(JsonReader* in, std::string* out) {
  BCP_ASSIGN_OR_RETURN(*out, in->string());
  return Status::ok();
}

/// Returns the plain dtype of a name of NumPy, such as `<f4`, or of JAX, such as `bfloat16`.
base::Result<tensor::DType> dtype_of(const std::string& name) {
  constexpr std::pair<std::string_view, std::string_view> kKinds[] = {
      {"f2", "float16"}, {"f4", "float32"}, {"f8", "float64"},   {"i1", "int8"},       {"i2", "int16"},
      {"i4", "int32"},   {"i8", "int64"},   {"u1", "uint8"},     {"u2", "uint16"},     {"u4", "uint32"},
      {"u8", "uint64"},  {"b1", "bool"},    {"c8", "complex64"}, {"c16", "complex128"}};
  std::string_view torch = name;
  const bool is_of_numpy = name.size() > 1 && (name[0] == '<' || name[0] == '|');
  for (const auto& [kind, known] : kKinds) {
    if (is_of_numpy && std::string_view(name).substr(1) == kind) torch = known;
  }
  const tensor::DTypeInfo* const found = tensor::find_dtype(torch);
  if (name.empty()) return Status::make(Code::kCorrupt, "an array of zarr without a dtype");
  if (found == nullptr || !found->is_plain()) return unsupported("dtype", name);
  return found->dtype;
}

/// A codec of version 3, or anything else that has a name and a configuration.
struct Named {
  std::string name;
  std::optional<tensor::Dims> chunk_sizes;
  std::vector<std::string> codecs, index_codecs;
  std::string endian = "little", separator, index_location = "end";
};

Status names_of(const std::vector<Named>& codecs, std::vector<std::string>* names) {
  names->clear();
  for (const Named& codec : codecs) {
    if (codec.endian != "little") return unsupported("byte order", codec.endian);
    names->push_back(codec.name);
  }
  return Status::ok();
}

Status read_codecs(JsonReader* in, std::vector<Named>* codecs);

/// Reads the names of codecs that need no more than these. \returns kUnsupported for big-endian bytes.
Status read_inner_codecs(JsonReader* in, std::vector<std::string>* names) {
  std::vector<Named> codecs;
  BCP_RETURN_IF_ERROR(read_codecs(in, &codecs));
  return names_of(codecs, names);
}

Status read_configuration(JsonReader* in, Named* out) {
  return in->object([&](const std::string& key) {
    if (key == "chunk_shape") return read_dims(in, &out->chunk_sizes.emplace());
    if (key == "codecs") return read_inner_codecs(in, &out->codecs);
    if (key == "index_codecs") return read_inner_codecs(in, &out->index_codecs);
    if (key == "endian") return read_string(in, &out->endian);
    if (key == "separator") return read_string(in, &out->separator);
    if (key == "index_location") return read_string(in, &out->index_location);
    return in->skip();
  });
}

Status read_named(JsonReader* in, Named* out) {
  return in->object([&](const std::string& key) {
    if (key == "name") return read_string(in, &out->name);
    return key == "configuration" ? read_configuration(in, out) : in->skip();
  });
}

Status read_codecs(JsonReader* in, std::vector<Named>* codecs) {
  constexpr size_t kMostCodecs = 8;
  return in->array([&]() -> Status {
    if (codecs->size() == kMostCodecs) return JsonReader::fault(in->position(), "too many codecs");
    return read_named(in, &codecs->emplace_back());
  });
}

/// Takes `bytes`, and behind it nothing or `zstd`.
Status take_codecs(const std::vector<std::string>& names, ZarrArray* out) {
  if (names.empty() || names[0] != "bytes") return unsupported("codec", names.empty() ? "none" : names[0]);
  out->is_packed = names.size() == 2 && names[1] == "zstd";
  return names.size() == 1 || out->is_packed ? Status::ok() : unsupported("codec", names[1]);
}

Status take_codecs(const std::vector<Named>& codecs, ZarrArray* out) {
  if (codecs.size() != 1 || codecs[0].name != "sharding_indexed") {
    std::vector<std::string> names;
    BCP_RETURN_IF_ERROR(names_of(codecs, &names));
    return take_codecs(names, out);
  }
  const Named& sharding = codecs[0];
  const std::vector<std::string>& of_index = sharding.index_codecs;
  out->has_index = true;
  out->is_index_first = sharding.index_location == "start";
  out->has_index_crc = of_index.size() == 2 && of_index[1] == "crc32c";
  if (of_index.empty() || of_index[0] != "bytes" || (of_index.size() > 1 && !out->has_index_crc)) {
    return unsupported("codec of an index", of_index.empty() ? "none" : of_index.back());
  }
  if (!sharding.chunk_sizes.has_value()) return Status::make(Code::kCorrupt, "sharding_indexed without chunk_shape");
  out->inner_sizes = *sharding.chunk_sizes;
  return take_codecs(sharding.codecs, out);
}

Status set_separator(const std::string& separator, ZarrArray* out) {
  if (separator != "." && separator != "/") return unsupported("separator", separator);
  out->separator = separator[0];
  return Status::ok();
}

bool multiplies_to(const tensor::Dims& dims, int64_t most) {
  int64_t numel = 0;
  return tensor::checked_numel(dims, &numel) && numel <= most;
}

/// Checks what the numbers of an array must be to one another.
Status check(const ZarrArray& array) {
  constexpr int64_t kMostBytes = int64_t{1} << 60;
  const size_t dims = array.sizes.size();
  bool is_sound = array.chunk_sizes.size() == dims && array.inner_sizes.size() == dims &&
                  multiplies_to(array.sizes, kMostBytes / 16) && multiplies_to(array.chunk_sizes, kMostBytes / 16);
  for (size_t d = 0; is_sound && d < dims; ++d) {
    is_sound = array.chunk_sizes[d] > 0 && array.inner_sizes[d] > 0 && array.chunk_sizes[d] % array.inner_sizes[d] == 0;
  }
  if (!is_sound) {
    return Status::make(Code::kCorrupt, text("an array of zarr has shape ", tensor::to_text(array.sizes),
                                             ", chunks of ", tensor::to_text(array.chunk_sizes), " and pieces of ",
                                             tensor::to_text(array.inner_sizes)));
  }
  if (multiplies_to(array.num_chunks(), kMostChunks) && multiplies_to(array.num_pieces(), kMostPieces)) {
    return Status::ok();
  }
  return Status::make(Code::kUnsupported, text("an array of zarr has ", tensor::to_text(array.num_chunks()),
                                               " chunks of ", tensor::to_text(array.num_pieces()), " pieces"));
}

tensor::Dims quotients(const tensor::Dims& sizes, const tensor::Dims& of) {
  tensor::Dims out;
  for (size_t d = 0; d < sizes.size(); ++d) out.push_back(sizes[d] / of[d] + (sizes[d] % of[d] != 0 ? 1 : 0));
  return out;
}

}  // namespace

std::string ZarrArray::name_of_chunk(const tensor::Dims& position) const {
  std::string name = has_c ? "c" : "";
  for (const int64_t at : position) {
    if (!name.empty()) name += separator;
    name += std::to_string(at);
  }
  return name.empty() ? "0" : name;
}

tensor::Dims ZarrArray::num_chunks() const {
  return quotients(sizes, chunk_sizes);
}

tensor::Dims ZarrArray::num_pieces() const {
  return quotients(chunk_sizes, inner_sizes);
}

int64_t ZarrArray::piece_bytes() const {
  int64_t numel = 0;
  (void)tensor::checked_numel(inner_sizes, &numel);  // `check` has looked
  return numel * tensor::find_plain_dtype(dtype)->itemsize_bytes;
}

int64_t ZarrArray::index_bytes() const {
  int64_t pieces = 0;
  (void)tensor::checked_numel(num_pieces(), &pieces);
  return pieces * kIndexEntryBytes + (has_index_crc ? kCrcBytes : 0);
}

base::Result<ZarrArray> read_zarr2(std::string_view json) {
  using Ids = std::vector<std::string>;
  JsonReader in(json);
  ZarrArray out;
  std::string dtype, order = "C", separator = ".";
  Ids compressors, filters;
  const auto read_id = [&](Ids* ids) {
    std::string& id = ids->emplace_back();
    return in.object([&](const std::string& key) { return key == "id" ? read_string(&in, &id) : in.skip(); });
  };
  BCP_RETURN_IF_ERROR(in.object([&](const std::string& key) {
    if (key == "shape") return read_dims(&in, &out.sizes);
    if (key == "chunks") return read_dims(&in, &out.chunk_sizes);
    if (key == "dtype") return read_string(&in, &dtype);
    if (key == "order") return read_string(&in, &order);
    if (key == "dimension_separator") return read_string(&in, &separator);
    if (key != "filters" && key != "compressor") return in.skip();
    if (in.take_null()) return Status::ok();
    return key == "filters" ? in.array([&] { return read_id(&filters); }) : read_id(&compressors);
  }));
  BCP_RETURN_IF_ERROR(in.end());
  const bool is_in_order = order == "C" || (order == "F" && out.sizes.size() < 2);
  if (!is_in_order) return unsupported("order", order);
  if (!filters.empty()) return unsupported("filter", filters[0]);
  out.is_packed = !compressors.empty();
  if (out.is_packed && compressors[0] != "zstd") return unsupported("compressor", compressors[0]);
  out.inner_sizes = out.chunk_sizes;
  BCP_RETURN_IF_ERROR(set_separator(separator, &out));
  BCP_ASSIGN_OR_RETURN(out.dtype, dtype_of(dtype));
  BCP_RETURN_IF_ERROR(check(out));
  return out;
}

base::Result<ZarrArray> read_zarr3(std::string_view json) {
  JsonReader in(json);
  ZarrArray out;
  Named grid, names;
  std::vector<Named> codecs;
  std::string dtype, type = "array";
  BCP_RETURN_IF_ERROR(in.object([&](const std::string& key) {
    if (key == "shape") return read_dims(&in, &out.sizes);
    if (key == "data_type") return read_string(&in, &dtype);
    if (key == "chunk_grid") return read_named(&in, &grid);
    if (key == "chunk_key_encoding") return read_named(&in, &names);
    if (key == "codecs") return read_codecs(&in, &codecs);
    return key == "node_type" ? read_string(&in, &type) : in.skip();
  }));
  BCP_RETURN_IF_ERROR(in.end());
  if (type != "array") return unsupported("node_type", type);
  if (grid.name != "regular" || !grid.chunk_sizes.has_value()) return unsupported("chunk_grid", grid.name);
  out.chunk_sizes = out.inner_sizes = *grid.chunk_sizes;
  out.has_c = names.name == "default";
  if (!out.has_c && names.name != "v2") return unsupported("chunk_key_encoding", names.name);
  const std::string usual = out.has_c ? "/" : ".";
  BCP_RETURN_IF_ERROR(set_separator(names.separator.empty() ? usual : names.separator, &out));
  BCP_ASSIGN_OR_RETURN(out.dtype, dtype_of(dtype));
  BCP_RETURN_IF_ERROR(take_codecs(codecs, &out));
  BCP_RETURN_IF_ERROR(check(out));
  return out;
}

base::Result<std::vector<ZarrPiece>> read_zarr_index(const ZarrArray& array, std::string_view index,
                                                     int64_t file_bytes) {
  constexpr uint64_t kAbsent = ~uint64_t{0};
  if (array.has_index_crc) {
    const std::string_view entries = index.substr(0, index.size() - kCrcBytes);
    const uint32_t stored = base::ByteReader(index.substr(entries.size())).u32(), computed = crc32c(entries);
    if (stored != computed) {
      return Status::make(Code::kCorrupt, text("the index has CRC-32C ", base::crc_text(computed), ", but stored is ",
                                               base::crc_text(stored)));
    }
  }
  base::ByteReader in(index);
  std::vector<ZarrPiece> pieces(index.size() / kIndexEntryBytes);
  for (ZarrPiece& piece : pieces) {
    const uint64_t offset = in.u64(), bytes = in.u64();
    if (offset == kAbsent && bytes == kAbsent) continue;
    const auto limit = static_cast<uint64_t>(file_bytes);
    if (offset > limit || bytes > limit - offset) {
      return Status::make(Code::kCorrupt, text("the index names ", bytes, " bytes at ", offset, " of a file of ",
                                               file_bytes, " bytes"));
    }
    piece = {static_cast<int64_t>(offset), static_cast<int64_t>(bytes)};
  }
  return pieces;
}

}  // namespace bytecheckpoint::format
