// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "csrc/format/manifest.h"

// The objects of torch.distributed.checkpoint, read and made here and nowhere else: plans and metadata have one or more
// of them a tensor, and a hundred thousand of them take a second in Python. Needs the GIL throughout.

namespace bytecheckpoint::bindings {

/// What a `WriteItem` asks to be stored.
struct PlannedWrite {
  std::string fqn;
  bool is_tensor = false;
  const tensor::DTypeInfo* dtype = nullptr;  // as declared; a tensor may resolve to another
  tensor::Box box;                           // of the tensor; no dims for bytes
};

/// Raises InvalidPlanError, naming the key, for a layout that is not strided or a dtype that is not in the format.
PlannedWrite read_write_item(pybind11::handle item);

/// The rest of what the `WriteItem` of a tensor says.
struct DeclaredTensor {
  tensor::TensorInfo info;
  bool is_shard = false;  // other ranks may hold other parts
};

/// Raises InvalidPlanError, naming the key, for what the format does not have.
DeclaredTensor read_declared_tensor(pybind11::handle item);

pybind11::object make_bytes_item(const std::string& fqn);
pybind11::object make_write_item(const std::string& fqn, const DeclaredTensor& declared, const tensor::Box& box);
/// The item for a part of a box that this rank holds: one of a shard, with the box it is cut from as `held`.
/// \param part_class  Subclass of WriteItem.
pybind11::object make_part_item(const std::string& fqn, const DeclaredTensor& declared, const tensor::Box& part,
                                const tensor::Box& held, const pybind11::object& part_class);

/// What a `ReadItem` asks for: a box of one stored chunk.
struct PlannedRead {
  std::string fqn;
  bool is_tensor = false;
  tensor::Dims chunk_offsets;
  int64_t hint = -1;  // position of the chunk to look at first
  tensor::Box box;    // offsets count from the chunk's first element
};

PlannedRead read_read_item(pybind11::handle item);

/// The ReadItem that asks for `read`. \param to  Where its first element goes, in the tensor that is loaded into.
/// \param local  Begin of the box that is held of that tensor.
pybind11::object make_read_item(const PlannedRead& read, const tensor::Dims& local, const tensor::Dims& to);

/// A ChunkStorageMetadata.
tensor::Box read_chunk(pybind11::handle chunk);

/// Items of `Metadata.state_dict_metadata`, in its order, without records.
/// Raises InvalidPlanError, naming the key, for what the format does not have.
std::vector<format::Item> read_state_dict_metadata(pybind11::handle entries);

/// `Metadata.state_dict_metadata` of a manifest, in the order of the state dict.
pybind11::dict make_state_dict_metadata(const format::Manifest& manifest);

/// `Metadata.storage_data` of a manifest. \param storage_info  DCP's class of the values.
pybind11::dict make_storage_data(const format::Manifest& manifest, const pybind11::object& storage_info);

}  // namespace bytecheckpoint::bindings
