// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/safetensors/safetensors.h"

#include <algorithm>
#include <tuple>

#include "csrc/base/bytes.h"
#include "csrc/format/json/json_reader.h"
#include "csrc/format/manifest/manifest.h"
#include "csrc/tensor/box.h"

namespace bytecheckpoint::format {
namespace {

using base::Code;
using base::Status;
using base::text;
using tensor::DType;

constexpr std::string_view kMetadata = "__metadata__";

struct NamedDType {
  std::string_view name;
  DType dtype;
};

constexpr NamedDType kDTypes[] = {
    {"F64", DType::kFloat64},
    {"F32", DType::kFloat32},
    {"F16", DType::kFloat16},
    {"BF16", DType::kBFloat16},
    {"I64", DType::kInt64},
    {"I32", DType::kInt32},
    {"I16", DType::kInt16},
    {"I8", DType::kInt8},
    {"U64", DType::kUInt64},
    {"U32", DType::kUInt32},
    {"U16", DType::kUInt16},
    {"U8", DType::kUInt8},
    {"BOOL", DType::kBool},
    {"C64", DType::kComplex64},
    {"F8_E4M3", DType::kFloat8E4M3FN},
    {"F8_E5M2", DType::kFloat8E5M2},
    {"F8_E8M0", DType::kFloat8E8M0FNU},
    {"F8_E4M3FNUZ", DType::kFloat8E4M3FNUZ},
    {"F8_E5M2FNUZ", DType::kFloat8E5M2FNUZ},
    {"F4", DType::kFloat4E2M1FNX2},
};

Status faulty(std::string message) {
  return Status::make(Code::kCorrupt, std::move(message));
}

/// Two values of 4 bits are one element of torch: halves the last dim.
Status pack_pairs(tensor::Dims* sizes) {
  if (sizes->empty() || sizes->back() % 2 != 0) {
    return Status::make(Code::kUnsupported, text("dtype F4 and shape ", tensor::to_text(*sizes),
                                                 ": torch needs an even number of values in the last dim"));
  }
  sizes->data()[sizes->size() - 1] /= 2;
  return Status::ok();
}

class HeaderReader {
 public:
  HeaderReader(std::string_view header, int64_t data_begin, int64_t data_bytes)
      : header_(header), json_(header), data_begin_(data_begin), data_bytes_(data_bytes) {}

  base::Result<SafetensorsHeader> read() {
    BCP_RETURN_IF_ERROR(json_.begin_object());
    for (std::string name;;) {
      BCP_ASSIGN_OR_RETURN(const bool is_there, json_.next_key(&name));
      if (!is_there) break;
      if (name == kMetadata) {
        if (!out_.metadata.empty()) return faulty("__metadata__ is there twice");
        BCP_RETURN_IF_ERROR(read_metadata().with_context(kMetadata));
      } else {
        out_.tensors.emplace_back().name = name;
        BCP_RETURN_IF_ERROR(read_tensor(&out_.tensors.back()).with_context(text("'", name, "'")));
      }
    }
    BCP_RETURN_IF_ERROR(json_.end());
    BCP_RETURN_IF_ERROR(check_names());
    BCP_RETURN_IF_ERROR(check_extents());
    return std::move(out_);
  }

 private:
  Status read_metadata() {
    const size_t begin = json_.position();
    BCP_RETURN_IF_ERROR(json_.begin_object());
    for (std::string key;;) {
      BCP_ASSIGN_OR_RETURN(const bool is_there, json_.next_key(&key));
      if (!is_there) break;
      BCP_RETURN_IF_ERROR(json_.string().status());
    }
    out_.metadata = header_.substr(begin, json_.position() - begin);
    return Status::ok();
  }

  Status read_tensor(SafetensorsTensor* out) {
    BCP_RETURN_IF_ERROR(json_.begin_object());
    std::string dtype;
    bool has_dtype = false, has_shape = false, has_offsets = false;
    tensor::Dims shape, offsets;
    for (std::string key;;) {
      BCP_ASSIGN_OR_RETURN(const bool is_there, json_.next_key(&key));
      if (!is_there) break;
      bool* const has = key == "dtype" ? &has_dtype : key == "shape" ? &has_shape : &has_offsets;
      if (has == &has_offsets && key != "data_offsets") return faulty(text("unknown field '", key, "'"));
      if (*has) return faulty(text(key, " is there twice"));
      *has = true;
      if (has == &has_dtype) {
        BCP_ASSIGN_OR_RETURN(dtype, json_.string());
      } else {
        BCP_RETURN_IF_ERROR(
            read_ints(has == &has_shape ? kMaxDims : 2, has == &has_shape ? &shape : &offsets).with_context(key));
      }
    }
    if (!has_dtype || !has_shape || !has_offsets) return faulty("it must have dtype, shape and data_offsets");
    if (offsets.size() != 2) return faulty(text("data_offsets: wanted two numbers, got ", offsets.size()));
    const auto* named = std::find_if(std::begin(kDTypes), std::end(kDTypes),
                                     [&](const NamedDType& each) { return each.name == dtype; });
    if (named == std::end(kDTypes)) {
      return Status::make(Code::kUnsupported, text("dtype ", dtype, ": torch has no such dtype"));
    }
    out->dtype = named->dtype;
    if (named->dtype == DType::kFloat4E2M1FNX2) BCP_RETURN_IF_ERROR(pack_pairs(&shape));
    int64_t numel, bytes;
    if (!tensor::checked_numel(shape, &numel) ||
        !base::checked_mul(numel, tensor::find_dtype(named->dtype)->itemsize_bytes, &bytes)) {
      return faulty(text("impossible shape ", tensor::to_text(shape)));
    }
    const int64_t begin = offsets[0], end = offsets[1];
    if (begin < 0 || begin > end || end > data_bytes_) {
      return faulty(text("data_offsets ", tensor::to_text(offsets), " are not within the ", data_bytes_,
                         " bytes that follow the header"));
    }
    if (end - begin != bytes) {
      return faulty(text("dtype ", dtype, " and shape ", tensor::to_text(shape), " are ", bytes,
                         " bytes, but data_offsets ", tensor::to_text(offsets), " are ", end - begin));
    }
    out->sizes = std::move(shape);
    out->offset = data_begin_ + begin;
    out->bytes = bytes;
    return Status::ok();
  }

  Status read_ints(size_t most, tensor::Dims* out) {
    BCP_RETURN_IF_ERROR(json_.begin_array());
    for (;;) {
      BCP_ASSIGN_OR_RETURN(const bool is_there, json_.next_element());
      if (!is_there) return Status::ok();
      if (out->size() == most) return faulty(text("more than ", most, " numbers"));
      BCP_ASSIGN_OR_RETURN(const int64_t number, json_.integer());
      if (number < 0) return faulty(text("negative number ", number));
      out->push_back(number);
    }
  }

  Status check_names() const {
    std::vector<std::string_view> names;
    names.reserve(out_.tensors.size());
    for (const SafetensorsTensor& each : out_.tensors) names.push_back(each.name);
    std::sort(names.begin(), names.end());
    const auto twice = std::adjacent_find(names.begin(), names.end());
    return twice == names.end() ? Status::ok() : faulty(text("'", *twice, "' is there twice"));
  }

  /// Sorts tensors by their place. Between two of them there may be neither a gap, in which bytes could hide, nor a
  /// common byte.
  Status check_extents() {
    std::stable_sort(out_.tensors.begin(), out_.tensors.end(), [](const auto& a, const auto& b) {
      return std::tie(a.offset, a.bytes) < std::tie(b.offset, b.bytes);
    });
    int64_t at = data_begin_;
    for (const SafetensorsTensor& each : out_.tensors) {
      if (each.offset != at) {
        return faulty(text("'", each.name, "': its elements begin at ", each.offset, ", but those before it end at ",
                           at, each.offset < at ? ": they overlap" : ": there is a gap"));
      }
      at += each.bytes;
    }
    const int64_t end = data_begin_ + data_bytes_;
    return at == end ? Status::ok() : faulty(text("the tensors end at ", at, ", but the file at ", end));
  }

  const std::string_view header_;
  JsonReader json_;
  const int64_t data_begin_, data_bytes_;
  SafetensorsHeader out_;
};

/// Whether it names a file right beside the index.
bool is_plain_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string_view::npos &&
         name.find('\0') == std::string_view::npos;
}

}  // namespace

base::Result<int64_t> safetensors_header_bytes(std::string_view prefix, int64_t file_bytes) {
  if (prefix.size() < kSafetensorsPrefixBytes) {
    return faulty(text("the file has ", file_bytes, " bytes, too few for safetensors"));
  }
  const uint64_t length = base::ByteReader(prefix).u64();
  if (length > static_cast<uint64_t>(file_bytes - kSafetensorsPrefixBytes)) {
    return faulty(text("the header has ", length, " bytes by its own account, but the file has only ", file_bytes));
  }
  if (length > static_cast<uint64_t>(kMostSafetensorsHeaderBytes)) {
    return Status::make(Code::kUnsupported, text("the header has ", length, " bytes, more than the ",
                                                 kMostSafetensorsHeaderBytes, " that the format allows"));
  }
  return static_cast<int64_t>(length);
}

base::Result<SafetensorsHeader> read_safetensors_header(std::string_view header, int64_t file_bytes) {
  const int64_t data_begin = kSafetensorsPrefixBytes + static_cast<int64_t>(header.size());
  HeaderReader reader(header, data_begin, file_bytes - data_begin);
  auto read = reader.read();
  if (read.is_ok()) return read;
  Status failure = read.status().with_context("safetensors");
  if (failure.offset() < 0) return failure;
  const int64_t offset = kSafetensorsPrefixBytes + failure.offset();
  return std::move(failure).at(offset, 1);
}

base::Result<std::vector<std::pair<std::string, std::string>>> read_safetensors_index(std::string_view index) {
  JsonReader json(index);
  std::vector<std::pair<std::string, std::string>> files;
  bool has_map = false;
  BCP_RETURN_IF_ERROR(json.begin_object());
  for (std::string key;;) {
    BCP_ASSIGN_OR_RETURN(const bool is_there, json.next_key(&key));
    if (!is_there) break;
    if (key != "weight_map") {
      BCP_RETURN_IF_ERROR(json.skip());
      continue;
    }
    if (has_map) return faulty("weight_map is there twice");
    has_map = true;
    BCP_RETURN_IF_ERROR(json.begin_object());
    for (std::string name;;) {
      BCP_ASSIGN_OR_RETURN(const bool has_name, json.next_key(&name));
      if (!has_name) break;
      BCP_ASSIGN_OR_RETURN(std::string file, json.string());
      if (!is_plain_name(file)) {
        return faulty(text("'", name, "': file name '", file, "' is not that of a file beside the index"));
      }
      files.emplace_back(std::move(name), std::move(file));
    }
  }
  BCP_RETURN_IF_ERROR(json.end());
  if (!has_map) return faulty("an index must have a weight_map");
  std::sort(files.begin(), files.end());
  const auto twice =
      std::adjacent_find(files.begin(), files.end(), [](const auto& a, const auto& b) { return a.first == b.first; });
  if (twice != files.end()) return faulty(text("'", twice->first, "' is in the weight_map twice"));
  return files;
}

const char* safetensors_name(DType dtype) {
  for (const NamedDType& each : kDTypes) {
    if (each.dtype == dtype) return each.name.data();
  }
  return nullptr;
}

}  // namespace bytecheckpoint::format
