// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "csrc/format/manifest/manifest.h"

// Reads and makes the objects of torch.distributed.checkpoint; nothing else in C++ does. Plans and metadata have one or
// more of them for each tensor, and a hundred thousand of them take a second in Python. All functions need the GIL.

namespace bytecheckpoint::bridge {

/// What a `WriteItem` asks to store.
struct WriteItemFields {
  std::string fqn;
  bool is_tensor = false;
  const tensor::DTypeInfo* dtype = nullptr;  // declared dtype; the planner may resolve the tensor to another
  tensor::Box box;                           // offsets and sizes in the tensor; no dims for bytes
};

/// Reads a WriteItem. Raises InvalidPlanError, naming the key, for a layout that is not strided, or a dtype that is not
/// in the format.
WriteItemFields read_write_item(pybind11::handle item);

/// What else the `WriteItem` of a tensor says.
struct DeclaredTensor {
  tensor::TensorInfo info;
  bool is_shard = false;  // other ranks may hold other parts
};

/// Raises InvalidPlanError, naming the key, for what the format does not have.
DeclaredTensor read_declared_tensor(pybind11::handle item);

/// Make the WriteItems for bytes, and for a box of a tensor.
pybind11::object make_bytes_item(const std::string& fqn);
pybind11::object make_write_item(const std::string& fqn, const DeclaredTensor& declared, const tensor::Box& box);
/// Makes the item for a part of a box that this rank holds: a shard, which also has the box `held` that it is cut from.
/// \param part_class  Subclass of WriteItem.
pybind11::object make_part_item(const std::string& fqn, const DeclaredTensor& declared, const tensor::Box& part,
                                const tensor::Box& held, const pybind11::object& part_class);

/// What a `ReadItem` asks for: a box of one stored chunk.
struct PlannedRead {
  std::string fqn;
  bool is_tensor = false;
  tensor::Dims chunk_offsets;
  int64_t hint = -1;  // position of the chunk to try first
  tensor::Box box;    // offsets count from the chunk's first element
};

/// Reads a ReadItem.
PlannedRead read_read_item(pybind11::handle item);

/// Makes the ReadItem that asks for `read`.
/// \param local  Offsets of the box that this rank holds, in the tensor that is loaded into.
/// \param box    Number of that box among those that the rank holds.
/// \param to     Where the first element goes, counted from the begin of that box.
pybind11::object make_read_item(const PlannedRead& read, const tensor::Dims& local, size_t box, const tensor::Dims& to);

/// Reads a ChunkStorageMetadata.
tensor::Box read_chunk(pybind11::handle chunk);

/// Reads `Metadata.state_dict_metadata`. Returns its items in its order, without records. Raises InvalidPlanError,
/// naming the key, for what the format does not have.
std::vector<format::Item> read_state_dict_metadata(pybind11::handle entries);

/// Makes `Metadata.state_dict_metadata` from a manifest, in the order of the state dict.
pybind11::dict make_state_dict_metadata(const format::Manifest& manifest);

/// Makes `Metadata.storage_data` from a manifest. \param storage_info  DCP's class of the values.
pybind11::dict make_storage_data(const format::Manifest& manifest, const pybind11::object& storage_info);

}  // namespace bytecheckpoint::bridge
