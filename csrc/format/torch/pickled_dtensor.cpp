// SPDX-License-Identifier: Apache-2.0
#include "csrc/format/torch/pickled_dtensor.h"

#include <algorithm>
#include <vector>

#include "csrc/base/status.h"
#include "csrc/format/manifest/manifest.h"
#include "csrc/format/torch/pickled_attributes.h"

namespace bytecheckpoint::format {
namespace {

using base::text;
using Kind = PickleValue::Kind;

/// How a DTensor lies along one dim of its mesh.
struct Placement {
  int64_t dim = -1;    // that is sharded; -1: none, each has all of it
  int64_t factor = 0;  // of a strided shard: into so many parts the tensor was sharded before; else 0
};

/// Cuts a range as torch.chunk does, and keeps part `number` of `count`.
void keep_chunk(int64_t number, int64_t count, int64_t* offset, int64_t* size) {
  const int64_t most = (*size + count - 1) / count;
  const int64_t begin = std::min(*size, most * number);
  *offset += begin;
  *size = std::min(most, *size - begin);
}

class DTensorPickle {
 public:
  DTensorPickle(const Pickle& pickle, const GlobalNames& names, std::string* why_not)
      : pickle_(pickle), names_(names), why_not_(*why_not) {}

  std::optional<PickledDTensor> read(const PickleValue& value) {
    PickledDTensor read;
    const PickleSpan args = pickle_.children(pickle_.object(value)->args);
    const std::optional<PickledTensor> local = read_pickled_tensor(pickle_, attribute(args[3], "_local_tensor"));
    if (!local.has_value()) return no("its local part is no plain tensor");
    read.local = *local;
    const PickleValue spec = attribute(args[3], "_spec"), mesh = attribute(spec, "mesh");
    int64_t numel = 0;
    const PickleSpan of_wrapper = pickle_.children(args[2]);
    if (of_wrapper.size() < 3 || !read_pickled_ints(pickle_, of_wrapper[2], &read.global_sizes) ||
        !tensor::checked_numel(read.global_sizes, &numel)) {
      return no("it has no global shape");
    }
    if (!read_mesh(mesh)) return no("its mesh cannot be read");
    if (!has_ascending_ranks(mesh)) {
      return no(
          "the ranks along a dim of its mesh do not ascend: by what torch writes, its parts may be in either order");
    }
    const PickleValue listed = attribute(spec, "placements");
    const PickleSpan placements = pickle_.children(listed);
    if (!is_sequence(listed) || placements.size() != mesh_sizes_.size()) return no("it has no placement for each dim");
    for (const PickleValue& each : placements) {
      Placement placement;
      if (!read_placement(each, read.global_sizes.size(), &placement)) return std::nullopt;
      placements_.push_back(placement);
    }
    if (!read_order(attribute(spec, "shard_order"))) return no("its order of shards cannot be read");
    read.box = tensor::whole(read.global_sizes);
    if (!cut(&read.box)) return std::nullopt;
    // FSDP keeps an empty part as one of shape [0, 0], whatever the other dims are.
    const bool are_empty = !tensor::has_elements(read.box) && !tensor::has_elements(tensor::whole(read.local.sizes));
    if (are_empty || read.box.sizes == read.local.sizes) return read;
    return no(text("its local part has the shape ", tensor::to_text(read.local.sizes), ", and by its placements ",
                   tensor::to_text(read.box.sizes)));
  }

 private:
  std::nullopt_t no(std::string reason) {
    why_not_ = "it is a DTensor, and " + std::move(reason);
    return std::nullopt;
  }

  std::string_view name_of(const PickleValue& value) const {
    const std::optional<PickleObject> object = pickle_.object(value);
    if (!object.has_value() || value.is(Kind::kPersistent)) return {};
    return names_.name_of(object->global).second;
  }

  static bool is_sequence(const PickleValue& value) { return value.is(Kind::kTuple) || value.is(Kind::kList); }

  PickleValue attribute(const PickleValue& of, std::string_view name) const { return attribute_of(pickle_, of, name); }

  /// Reads the product of numbers in nested tuples: what a dim of a mesh has that was made of several.
  bool read_product(const PickleValue& value, int depth, int64_t* product) const {
    int64_t number = 0;
    if (read_pickled_int(pickle_, value, &number)) {
      const bool fits = number > 0 && *product <= kMostRanks / number;
      *product *= fits ? number : 1;
      return fits;
    }
    if (!is_sequence(value) || depth > kMaxMeshDepth) return false;
    for (const PickleValue& each : pickle_.children(value)) {
      if (!read_product(each, depth + 1, product)) return false;
    }
    return true;
  }

  /// Reads how many ranks each dim of the mesh has, and where this rank is. Versions of torch keep a tensor of ranks, a
  /// layout of shape and strides, or one with a layout for each dim.
  bool read_mesh(const PickleValue& mesh) {
    if (!read_pickled_ints(pickle_, attribute(mesh, "_coordinate_on_dim"), &coordinates_)) return false;
    const PickleValue layout = attribute(mesh, "_layout");
    const PickleValue axes = attribute(layout, "axes"), shape = attribute(layout, "shape");
    if (is_sequence(axes)) {
      for (const PickleValue& axis : pickle_.children(axes)) {
        if (!add_mesh_size(attribute(axis, "shape"))) return false;
      }
    } else if (is_sequence(shape)) {
      for (const PickleValue& size : pickle_.children(shape)) {
        if (!add_mesh_size(size)) return false;
      }
    } else if (shape.is(Kind::kInt)) {
      if (!add_mesh_size(shape)) return false;
    } else {
      const std::optional<PickledTensor> ranks = read_pickled_tensor(pickle_, attribute(mesh, "mesh"));
      if (!ranks.has_value()) return false;
      mesh_sizes_ = ranks->sizes;
    }
    if (coordinates_.size() != mesh_sizes_.size()) return false;
    int64_t num_ranks = 1;
    for (size_t m = 0; m < mesh_sizes_.size(); ++m) {
      const int64_t size = mesh_sizes_[m];
      if (size < 1 || size > kMostRanks / num_ranks || coordinates_[m] < 0 || coordinates_[m] >= size) return false;
      num_ranks *= size;
    }
    return true;
  }

  /// Whether the ranks along each dim of the mesh ascend. Process groups sort theirs, and collectives give parts by the
  /// order in the group, which then differs from the place in the mesh. True if the pickle does not say.
  bool has_ascending_ranks(const PickleValue& mesh) const {
    const PickleValue listed = attribute(mesh, "_flatten_rank_map"), keeps = attribute(mesh, "_preserve_rank_order");
    if (!listed.is(Kind::kTuple) || (keeps.is(Kind::kBool) && keeps.is_true())) return true;
    std::vector<int64_t> ranks;
    for (const PickleValue& rank : pickle_.children(listed)) {
      if (!read_pickled_int(pickle_, rank, &ranks.emplace_back())) return true;
    }
    for (const PickleValue& axis : pickle_.children(attribute(attribute(mesh, "_layout"), "axes"))) {
      tensor::Dims size, stride;
      const bool is_simple = read_pickled_ints(pickle_, attribute(axis, "shape"), &size) &&
                             read_pickled_ints(pickle_, attribute(axis, "stride"), &stride) && size.size() == 1 &&
                             stride.size() == 1 && size[0] > 0 && stride[0] > 0;
      if (!is_simple) continue;
      const auto step = static_cast<size_t>(stride[0]), count = static_cast<size_t>(size[0]);
      for (size_t r = 0; step < ranks.size() && r < ranks.size() - step; ++r) {
        if ((r / step) % count + 1 < count && ranks[r] > ranks[r + step]) return false;
      }
    }
    return true;
  }

  bool add_mesh_size(const PickleValue& size) {
    int64_t product = 1;
    if (!read_product(size, 0, &product) || mesh_sizes_.size() == kMaxDims) return false;
    mesh_sizes_.push_back(product);
    return true;
  }

  /// The numbers of a placement are attributes, or arguments, by the version of torch.
  bool read_placement(const PickleValue& value, size_t num_dims, Placement* out) {
    const std::string_view name = name_of(value);
    if (name == "Replicate") return true;
    if (name != "Shard" && name != "_StridedShard") {
      (void)no(text("its placement ", name.empty() ? "is none" : name, " cannot be read"));
      return false;
    }
    const PickleSpan args = pickle_.children(pickle_.object(value)->args);
    PickleValue dim = attribute(value, "dim"), factor = attribute(value, "split_factor");
    if (dim.is(Kind::kHole) && args.size() > 0) dim = args[0];
    if (factor.is(Kind::kHole) && args.size() > 1) factor = args[1];
    if (!read_pickled_int(pickle_, dim, &out->dim) || out->dim < 0 || out->dim >= static_cast<int64_t>(num_dims) ||
        (name == "_StridedShard" && (!read_pickled_int(pickle_, factor, &out->factor) || out->factor < 1))) {
      (void)no("the numbers of a placement cannot be read");
      return false;
    }
    return true;
  }

  /// Reads in which order the dims of the mesh cut the tensor. None, or no such attribute, is the order of the mesh.
  bool read_order(const PickleValue& listed) {
    std::vector<bool> is_taken(placements_.size(), false);
    const PickleSpan entries = pickle_.children(listed);
    if (!is_sequence(listed)) {
      if (!listed.is(Kind::kHole) && !listed.is(Kind::kNone)) return false;
    } else {
      for (const PickleValue& entry : entries) {
        const std::optional<PickleObject> object = pickle_.object(entry);
        const PickleSpan args = object.has_value() ? pickle_.children(object->args) : PickleSpan();
        tensor::Dims mesh_dims;
        if (args.size() != 2 || !read_pickled_ints(pickle_, args[1], &mesh_dims)) return false;
        for (const int64_t m : mesh_dims) {
          if (m < 0 || m >= static_cast<int64_t>(placements_.size()) || is_taken[static_cast<size_t>(m)]) return false;
          is_taken[static_cast<size_t>(m)] = true;
          order_.push_back(static_cast<size_t>(m));
        }
      }
    }
    for (size_t m = 0; m < placements_.size(); ++m) {
      if (!is_taken[m]) order_.push_back(m);
    }
    return true;
  }

  /// Cuts the box of this rank out. What is sharded strided was sharded behind the others, which stand to its right.
  bool cut(tensor::Box* box) {
    const auto cut_by = [&](size_t m) {
      const auto d = static_cast<size_t>(placements_[m].dim);
      keep_chunk(coordinates_[m], mesh_sizes_[m], &box->offsets[d], &box->sizes[d]);
    };
    for (const size_t m : order_) {
      if (placements_[m].dim >= 0 && placements_[m].factor == 0) cut_by(m);
    }
    for (size_t m = placements_.size(); m-- > 0;) {
      if (placements_[m].factor == 0) continue;
      int64_t parts_right = 1;
      bool is_sharded_left = false;
      for (size_t other = 0; other < placements_.size(); ++other) {
        if (placements_[other].dim != placements_[m].dim) continue;
        if (other > m) parts_right *= mesh_sizes_[other];
        is_sharded_left |= other < m && placements_[other].factor == 0;
      }
      if (parts_right != placements_[m].factor || is_sharded_left) {
        (void)no(text("it is sharded with strides of ", placements_[m].factor, ", and not as FSDP does over tensor ",
                      "parallelism"));
        return false;
      }
      cut_by(m);
    }
    return true;
  }

  static constexpr int kMaxMeshDepth = 8;
  static constexpr int64_t kMostRanks = 1 << 24;

  const Pickle& pickle_;
  const GlobalNames& names_;
  std::string& why_not_;
  tensor::Dims mesh_sizes_;
  tensor::Dims coordinates_;
  std::vector<Placement> placements_;
  std::vector<size_t> order_;  // of the dims of the mesh, that cuts first before others
};

}  // namespace

bool is_pickled_dtensor(const Pickle& pickle, const GlobalNames& names, const PickleValue& value) {
  if (!value.is(Kind::kCall)) return false;
  const PickleObject object = *pickle.object(value);
  const PickleSpan args = pickle.children(object.args);
  if (names.name_of(object.global) != GlobalNames::Name("torch._tensor", "_rebuild_from_type_v2") || args.size() != 4 ||
      !args[1].is(Kind::kGlobal)) {
    return false;
  }
  const auto& [module, name] = names.name_of(args[1].global());
  return name == "DTensor" && module.substr(0, 17) == "torch.distributed";
}

std::optional<PickledDTensor> read_pickled_dtensor(const Pickle& pickle, const GlobalNames& names,
                                                   const PickleValue& value, std::string* why_not) {
  return DTensorPickle(pickle, names, why_not).read(value);
}

}  // namespace bytecheckpoint::format
