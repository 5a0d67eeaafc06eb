// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/open/zero_reader.h"

#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "csrc/engine/open/zero_values.h"
#include "csrc/format/torch/stored_tensor.h"
#include "csrc/tensor/flat_range.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;
using format::Item;

constexpr std::string_view kModule = "module.", kOfOptimizer = "optimizer_state_dict.";
/// Behind `kOfOptimizer`: what is joined, or says how; what the optimizer has of each group, in ZeRO-1 and 2, and in 3.
constexpr std::string_view kFlat[] = {"single_partition_of_fp32_groups.", "fp32_flat_groups.", "param_slice_mappings."};
constexpr std::string_view kStates[] = {"base_optimizer_state.state.", "optimizer_state_dict.state."};
constexpr int64_t kMostElements = int64_t{1} << 48;  // of a parameter; so no sum of them overflows

/// Joins the parts that ranks have of parameters.
class ZeroReader {
 public:
  ZeroReader(const ZeroStep& step, const format::Manifest& read) : step_(step), read_(read) {
    for (const Item& item : read.items)
      items_.emplace(std::make_pair(item.chunks.front().record.file, item.fqn), &item);
  }

  Status run() {
    if (step_.is_universal) return run_universal();
    BCP_RETURN_IF_ERROR(check_num_ranks());
    BCP_RETURN_IF_ERROR(read_shapes());
    if (find(optimizer_file(0), text(kOfOptimizer, "single_partition_of_fp32_groups.0")) != nullptr) {
      BCP_RETURN_IF_ERROR(join_slices());
    } else if (find(optimizer_file(0), text(kOfOptimizer, "fp32_flat_groups.0")) != nullptr) {
      is_stage_3_ = true;
      BCP_RETURN_IF_ERROR(join_equal_parts());
    } else {
      return Status::make(Code::kUnsupported,
                          text("open(", step_.directory, "): ", step_.optimizers[0], " has no partition of weights in ",
                               "fp32 that is known here: write whole ones by DeepSpeed's zero_to_fp32.py"),
                          step_.directory);
    }
    for (const auto& [name, shape] : shapes_) {
      if (done_[name] == shape.numel) continue;
      return corrupt(text("'", name, "': the ranks have ", done_[name], " elements of ", shape.numel,
                          ": files of ranks are missing"));
    }
    BCP_RETURN_IF_ERROR(add_module());
    add_others();
    return Status::ok();
  }

  /// Sets the reasons of what is refused.
  void say_refusals(format::ForeignMeta* foreign) {
    for (const auto& [name, reason] : refused_) {
      format::set_text(format::RecordKind::kRefused, reason, foreign, &made_[name].chunks.front().record);
    }
  }

  /// Returns what was joined.
  std::vector<Item> take_items() {
    std::vector<Item> items;
    for (auto& [name, item] : made_) {
      item.fqn = name;
      item.ordinal = static_cast<uint32_t>(items.size());
      items.push_back(std::move(item));
    }
    return items;
  }

 private:
  struct Shape {
    tensor::Dims sizes;
    int64_t numel = 0;
    int group = 0;
  };

  /// What the optimizer has of each parameter of a group, such as a moment.
  struct State {
    std::string parameter;  // one that has it
    bool is_number = true;  // rather than of one value for each element
  };

  Status run_universal() {
    BCP_RETURN_IF_ERROR(read_shapes());
    for (uint32_t i = 0; i < step_.wholes.size(); ++i) BCP_RETURN_IF_ERROR(take_whole(step_.wholes[i], whole_file(i)));
    for (const auto& [name, shape] : shapes_) {
      if (made_.count(text(kModule, name)) == 0) return corrupt(text("zero/", name, "/fp32.pt is missing"));
      BCP_RETURN_IF_ERROR(check_states(name, shape));
    }
    BCP_RETURN_IF_ERROR(add_module());
    // What was saved of buffers and frozen parameters as fp32 is there once more, in its own dtype.
    for (auto& [name, item] : others_) made_.emplace(name, std::move(item));
    add_others();
    return Status::ok();
  }

  /// An optimizer has the same of each parameter of a group. \returns kCorrupt for one that lacks some of it.
  Status check_states(const std::string& name, const Shape& shape) const {
    const auto of_group = states_.find(shape.group);
    if (of_group == states_.end() || shape.numel == 0) return Status::ok();
    for (const auto& [key, first] : of_group->second) {
      const auto found = made_.find(text("optimizer.", name, ".", key));
      if (found == made_.end()) {
        return corrupt(text("zero/", name, "/", key, ".pt is missing, which zero/", first.parameter, " has"));
      }
      const bool is_number = found->second.tensor.sizes.empty() && !shape.sizes.empty();
      if (!is_number || first.is_number) continue;
      return corrupt(text("zero/", name, "/", key, ".pt has one number, but zero/", first.parameter, "/", key,
                          ".pt one for each element"));
    }
    return Status::ok();
  }

  /// Takes one value of a parameter. DeepSpeed stores it with its shape, or, of ZeRO-3, flat.
  Status take_whole(const ZeroStep::Whole& whole, uint32_t file) {
    const Item* stored = find(file, text(whole.key, ".param"));
    const bool is_flat = stored == nullptr;
    if (is_flat) stored = find(file, whole.key);
    const std::string path = text("zero/", whole.parameter, "/", whole.key, ".pt");
    if (stored == nullptr || !stored->is_tensor) return corrupt(text(path, " has no tensor"));
    const bool is_weight = whole.key == "fp32";
    const std::string name =
        is_weight ? text(kModule, whole.parameter) : text("optimizer.", whole.parameter, ".", whole.key);
    const auto known = shapes_.find(whole.parameter);
    if (known == shapes_.end()) {
      others_[name] = *stored;
      return Status::ok();
    }
    is_stage_3_ |= is_flat && is_weight;
    const Shape& shape = known->second;
    const bool is_whole = stored->tensor.sizes == shape.sizes;
    if (!is_weight && shape.numel > 0) {
      State& state = states_[shape.group].try_emplace(whole.key, State{whole.parameter, true}).first->second;
      const bool is_number = stored->tensor.sizes.empty();
      if (state.is_number && !is_number) state = {whole.parameter, false};
    }
    if (is_whole || (!is_weight && stored->tensor.sizes.empty())) {
      made_[name] = *stored;
      return Status::ok();
    }
    if (stored->tensor.sizes != tensor::Dims{shape.numel}) {
      return corrupt(text(path, " has the shape ", tensor::to_text(stored->tensor.sizes), ", wanted ",
                          tensor::to_text(shape.sizes)));
    }
    return add(name, shape.sizes, 0, shape.numel, *stored, 0);
  }

  Status corrupt(const std::string& message) const {
    return Status::make(Code::kCorrupt, text("open(", step_.directory, "): ", message), step_.directory);
  }

  uint32_t num_ranks() const { return static_cast<uint32_t>(step_.optimizers.size()); }
  uint32_t optimizer_file(uint32_t rank) const { return static_cast<uint32_t>(step_.models.size()) + rank; }
  uint32_t whole_file(uint32_t i) const { return optimizer_file(num_ranks()) + i; }

  const Item* find(uint32_t file, const std::string& name) const {
    const auto found = items_.find({file, name});
    return found == items_.end() ? nullptr : found->second;
  }

  /// Returns the values of a dict in the order that it has, with their keys.
  std::vector<std::pair<std::string, const Item*>> below(uint32_t file, const std::string& prefix) const {
    std::vector<std::pair<std::string, const Item*>> found;
    for (auto at = items_.lower_bound({file, prefix}); at != items_.end() && at->first.first == file; ++at) {
      if (at->first.second.compare(0, prefix.size(), prefix) != 0) break;
      found.emplace_back(at->first.second.substr(prefix.size()), at->second);
    }
    std::sort(found.begin(), found.end(),
              [](const auto& a, const auto& b) { return a.second->ordinal < b.second->ordinal; });
    return found;
  }

  /// Returns the pickle of an object; nothing for any other value.
  std::string_view pickle_of(const Item& item) const {
    const format::Record& record = item.chunks.front().record;
    return record.kind == format::RecordKind::kInline ? read_.foreign->text_of(record) : std::string_view();
  }

  /// Returns the numbers under a name in the file of a rank, or the number; none if it does not have them.
  std::vector<int64_t> counts(uint32_t rank, std::string_view name) const {
    const Item* const item = find(optimizer_file(rank), text(kOfOptimizer, name));
    std::vector<int64_t> found;
    if (item == nullptr || !read_counts(pickle_of(*item), &found)) found.clear();
    return found;
  }

  /// Files that an earlier save of more or fewer ranks has left in the folder would put parts in wrong places.
  Status check_num_ranks() const {
    if (step_.models.size() != 1 && step_.models.size() != step_.optimizers.size()) {
      return corrupt(text("there are files of models of ", step_.models.size(), " ranks, and of optimizers of ",
                          num_ranks(), ": files are missing, or another save has left some, which must go"));
    }
    for (uint32_t rank = 0; rank < num_ranks(); ++rank) {
      for (const int64_t count : counts(rank, "partition_count")) {
        if (count == num_ranks()) continue;
        return corrupt(text(step_.optimizers[rank], " is of a save with parts of ", count,
                            " ranks, but there are files", " of ", num_ranks(),
                            ": files are missing, or another save has left some, which must go"));
      }
    }
    return Status::ok();
  }

  base::Result<Shape> shape_of(const Item& item) const {
    Shape shape;
    const bool is_shape = read_size(pickle_of(item), &shape.sizes) && tensor::checked_numel(shape.sizes, &shape.numel);
    if (is_shape && shape.numel <= kMostElements) return shape;
    return corrupt(text("'", item.fqn, "' is no shape"));
  }

  /// The shapes of all parameters that train, in the order in which they were flattened.
  Status read_shapes() {
    for (int group = 0;; ++group) {
      const auto of_group = below(0, text("param_shapes.", group, "."));
      if (of_group.empty()) return Status::ok();
      for (const auto& [name, item] : of_group) {
        BCP_ASSIGN_OR_RETURN(Shape shape, shape_of(*item));
        order_.push_back(name);
        shape.group = group;
        shapes_[name] = std::move(shape);
      }
    }
  }

  /// Adds elements to a tensor: `count` of `flat`, from `start` on, as those from `begin` on.
  Status add(const std::string& name, const tensor::Dims& sizes, int64_t begin, int64_t count, const Item& flat,
             int64_t start) {
    const format::Record& record = flat.chunks.front().record;
    const bool is_flat = flat.is_tensor && flat.tensor.sizes.size() == 1 && record.kind == format::RecordKind::kTensor;
    if (!is_flat || start < 0 || count < 0 || start > flat.tensor.sizes[0] - count) {
      return corrupt(text("'", name, "' has ", count, " elements from ", start, " on of '", flat.fqn, "', which has ",
                          flat.is_tensor ? tensor::to_text(flat.tensor.sizes) : std::string("none")));
    }
    auto boxes = tensor::boxes_of_flat_range(sizes, begin, begin + count);
    if (!boxes.is_ok()) return corrupt(text("'", name, "': ", boxes.status().message()));
    Item& item = made_[name];
    if (item.chunks.empty()) {
      item.is_tensor = true;
      item.tensor = flat.tensor;
      item.tensor.sizes = sizes;
    } else if (item.tensor.dtype != flat.tensor.dtype) {
      return corrupt(text("'", name, "': ranks have it in several dtypes"));
    }
    const int64_t itemsize = tensor::find_dtype(flat.tensor.dtype)->itemsize_bytes;
    int64_t at = record.data_offset + start * itemsize;
    for (tensor::Box& box : boxes.value()) {
      int64_t numel = 0;
      (void)tensor::checked_numel(box.sizes, &numel);
      format::Record part = record;
      part.offset = part.data_offset = at;
      part.bytes = part.data_bytes = numel * itemsize;
      at += part.bytes;
      item.chunks.push_back({std::move(box), part});
    }
    return Status::ok();
  }

  /// Adds a part of a parameter, and the same part of what the optimizer has of each element.
  /// \param state  What the names of these begin with.
  /// \param padding  Elements that they may have behind those of the weights.
  Status add_part(const std::string& name, int64_t begin, int64_t count, uint32_t rank, const Item& flat,
                  const std::string& state, int64_t start, int64_t padding) {
    const tensor::Dims& sizes = shapes_[name].sizes;
    BCP_RETURN_IF_ERROR(add(text(kModule, name), sizes, begin, count, flat, start));
    for (const auto& [key, item] : below(optimizer_file(rank), state)) {
      if (!item->is_tensor || item->tensor.sizes.size() != 1) continue;
      const int64_t more = item->tensor.sizes[0] - flat.tensor.sizes[0];
      if (more != 0 && more != padding) continue;
      joined_.insert(item);
      BCP_RETURN_IF_ERROR(add(text("optimizer.", name, ".", key), sizes, begin, count, *item, start));
    }
    return Status::ok();
  }

  /// ZeRO-1 and 2: each rank says which part of which parameter its part of a group begins and goes on with.
  Status join_slices() {
    for (int group = 0;; ++group) {
      const std::string name_of_flat = text(kOfOptimizer, "single_partition_of_fp32_groups.", group);
      if (find(optimizer_file(0), name_of_flat) == nullptr) return Status::ok();
      for (uint32_t rank = 0; rank < num_ranks(); ++rank) {
        const Item* const flat = find(optimizer_file(rank), name_of_flat);
        if (flat == nullptr) return corrupt(text(step_.optimizers[rank], " has no ", name_of_flat));
        const auto slices = below(optimizer_file(rank), text(kOfOptimizer, "param_slice_mappings.", group, "."));
        const std::vector<int64_t> paddings = counts(rank, "group_paddings");
        const auto g = static_cast<size_t>(group);
        const int64_t padding = g < paddings.size() ? paddings[g] : 0;
        for (const auto& [name, item] : slices) {
          Fragment fragment;
          if (shapes_.count(name) == 0 || !read_fragment(pickle_of(*item), &fragment)) {
            return corrupt(text(step_.optimizers[rank], " has a part of '", name, "', which cannot be read"));
          }
          int64_t& done = done_[name];
          BCP_RETURN_IF_ERROR(add_part(name, done, fragment.numel, rank, *flat,
                                       text(kOfOptimizer, kStates[0], group, "."), fragment.start, padding));
          done += fragment.numel;
        }
      }
    }
  }

  /// ZeRO-3: of each parameter a rank has an equal part, one behind the other in its groups. The last may be padded.
  Status join_equal_parts() {
    for (uint32_t rank = 0; rank < num_ranks(); ++rank) {
      int group = 0;
      int64_t start = 0;
      for (const std::string& name : order_) {
        const int64_t numel = shapes_[name].numel, part = (numel + num_ranks() - 1) / num_ranks();
        const Item* flat = flat_group(rank, group);
        if (flat != nullptr && start == flat->tensor.sizes[0] && part > 0) {
          flat = flat_group(rank, ++group);
          start = 0;
        }
        if (flat == nullptr) return corrupt(text(step_.optimizers[rank], " has no part of '", name, "'"));
        const int64_t begin = std::min(numel, part * rank), count = std::min(part, numel - begin);
        if (start + part > flat->tensor.sizes[0]) {
          return corrupt(text(step_.optimizers[rank], ": the part of '", name, "' is in two groups"));
        }
        BCP_RETURN_IF_ERROR(add_part(name, begin, count, rank, *flat, text(kOfOptimizer, kStates[1], group, "."), start,
                                     /*padding=*/0));
        done_[name] += count;
        start += part;
      }
      const Item* const last = flat_group(rank, group);
      if (last != nullptr && last->tensor.sizes[0] == start && flat_group(rank, group + 1) == nullptr) continue;
      return corrupt(text(step_.optimizers[rank], " has more elements than parameters of ", num_ranks(),
                          " ranks: it is of another save than the others"));
    }
    return Status::ok();
  }

  /// Returns a group of a rank; null if there is none, or it is no flat tensor.
  const Item* flat_group(uint32_t rank, int group) const {
    const Item* const flat = find(optimizer_file(rank), text(kOfOptimizer, "fp32_flat_groups.", group));
    return flat != nullptr && flat->is_tensor && flat->tensor.sizes.size() == 1 ? flat : nullptr;
  }

  /// Adds what the module has beside the parameters that train.
  Status add_module() {
    std::vector<std::pair<std::string, std::string>> shared;
    for (const auto& [name, item] : below(0, std::string(kModule))) {
      const std::string full = text(kModule, name);
      // One without elements may be in no part.
      if (shapes_.count(name) != 0 && made_.count(full) != 0) continue;
      std::string other;
      const Item* const share = find(0, "shared_params." + name);
      const bool is_placeholder = is_stage_3_ && item->is_tensor && item->tensor.sizes == tensor::Dims{0};
      if (share != nullptr && read_text(pickle_of(*share), &other)) {
        shared.emplace_back(full, text(kModule, other));
      } else if (!is_placeholder) {
        made_[full] = *item;
      } else if (find(0, "frozen_param_fragments." + name) != nullptr) {
        BCP_RETURN_IF_ERROR(join_frozen(name));
      } else {
        refuse(full, "the module has a placeholder of ZeRO-3, and no rank says what it shares");
      }
    }
    for (const auto& [name, other] : shared) {
      const auto found = made_.find(other);
      if (found == made_.end()) return corrupt(text("'", name, "' is '", other, "', which is not there"));
      made_[name] = found->second;
    }
    return Status::ok();
  }

  /// A frozen parameter of ZeRO-3, of which each rank's module has a part.
  Status join_frozen(const std::string& name) {
    const Item* const stated = find(0, "frozen_param_shapes." + name);
    if (stated == nullptr) return corrupt(text("'", name, "' has no shape"));
    BCP_ASSIGN_OR_RETURN(const Shape shape, shape_of(*stated));
    const auto count_of = static_cast<int64_t>(step_.models.size());
    const int64_t part = (shape.numel + count_of - 1) / count_of;
    for (uint32_t rank = 0; rank < step_.models.size(); ++rank) {
      const Item* const fragment = find(rank, "frozen_param_fragments." + name);
      if (fragment == nullptr) return corrupt(text(step_.models[rank], " has no part of '", name, "'"));
      const int64_t begin = std::min(shape.numel, part * rank), count = std::min(part, shape.numel - begin);
      BCP_RETURN_IF_ERROR(add(text(kModule, name), shape.sizes, begin, count, *fragment, 0));
    }
    return Status::ok();
  }

  void refuse(const std::string& name, std::string_view why) {
    Item& item = made_[name];
    item.chunks.resize(1);
    refused_.emplace_back(name, text("'", name, "' cannot be read: ", why));
  }

  /// Adds what is of no parameter, as rank 0 has it.
  void add_others() {
    for (const auto& [name, item] : below(0, "")) {
      const bool is_known = begins_with_one(name, {kModule, "param_shapes.", "frozen_param_", "shared_params."});
      if (!is_known) made_.emplace(name, *item);
    }
    if (step_.optimizers.empty()) return;
    for (const auto& [name, item] : below(optimizer_file(0), "")) {
      std::string_view rest = name;
      if (rest.substr(0, kOfOptimizer.size()) == kOfOptimizer) rest.remove_prefix(kOfOptimizer.size());
      if (begins_with_one(rest, {kFlat[0], kFlat[1], kFlat[2]}) || joined_.count(item) != 0) continue;
      if (step_.is_universal && item->is_tensor && !item->tensor.sizes.empty()) continue;  // parts of rank 0
      if (!item->is_tensor || item->tensor.sizes.empty() || !begins_with_one(rest, {kStates[0], kStates[1]})) {
        made_.emplace(name, *item);
      } else {
        refuse(name, "the optimizer of each rank has its own, which is none of one value for each element");
      }
    }
  }

  const ZeroStep& step_;
  const format::Manifest& read_;
  std::map<std::pair<uint32_t, std::string>, const Item*> items_;  // by file and name
  std::vector<std::string> order_;
  std::map<std::string, Shape> shapes_;
  std::map<int, std::map<std::string, State>> states_;  // of a universal checkpoint: by group and key
  std::map<std::string, int64_t> done_;                 // elements of each parameter that were added
  std::set<const Item*> joined_;                        // of those of optimizers
  std::map<std::string, Item> made_;
  std::map<std::string, Item> others_;  // of a universal checkpoint: values of what does not train
  std::vector<std::pair<std::string, std::string>> refused_;
  bool is_stage_3_ = false;
};

}  // namespace

Status join_zero_parts(const ZeroStep& step, format::Manifest* manifest) {
  ZeroReader reader(step, *manifest);
  BCP_RETURN_IF_ERROR(reader.run());
  reader.say_refusals(&*manifest->foreign);
  manifest->items = reader.take_items();
  return Status::ok();
}

}  // namespace bytecheckpoint::engine
