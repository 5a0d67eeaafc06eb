// SPDX-License-Identifier: Apache-2.0
#include "csrc/engine/open/open_deepspeed.h"

#include <algorithm>
#include <cerrno>
#include <map>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "csrc/engine/open/model_files.h"
#include "csrc/engine/open/torch_files.h"
#include "csrc/engine/open/zero_values.h"
#include "csrc/format/torch/stored_tensor.h"
#include "csrc/io/directory.h"
#include "csrc/io/file.h"
#include "csrc/tensor/flat_range.h"

namespace bytecheckpoint::engine {
namespace {

using base::Code;
using base::Status;
using base::text;

constexpr std::string_view kWhatOfDeepSpeed = "step of DeepSpeed";
using format::Item;

constexpr std::string_view kModule = "module.", kOfOptimizer = "optimizer_state_dict.";
constexpr int64_t kMostNameBytes = 256;
constexpr int64_t kMostElements = int64_t{1} << 48;  // of a parameter; so no sum of them overflows

/// The files of a step. Each list is in the order of ranks.
struct StepFiles {
  std::string directory;
  std::vector<std::string> models;
  std::vector<std::string> optimizers;
};

/// Joins the parts that ranks have of parameters.
class ZeroReader {
 public:
  ZeroReader(const StepFiles& step, const format::Manifest& read) : step_(step), read_(read) {
    for (const Item& item : read.items)
      items_.emplace(std::make_pair(item.chunks.front().record.file, item.fqn), &item);
  }

  Status run() {
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
  };

  Status corrupt(const std::string& message) const {
    return Status::make(Code::kCorrupt, text("open(", step_.directory, "): ", message), step_.directory);
  }

  uint32_t num_ranks() const { return static_cast<uint32_t>(step_.optimizers.size()); }
  uint32_t optimizer_file(uint32_t rank) const { return static_cast<uint32_t>(step_.models.size()) + rank; }

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

  /// Adds a part of a parameter, and the same part of what the optimizer has of it.
  Status add_part(const std::string& name, int64_t begin, int64_t count, uint32_t rank, const Item& flat,
                  const std::string& state, int64_t start) {
    const tensor::Dims& sizes = shapes_[name].sizes;
    BCP_RETURN_IF_ERROR(add(text(kModule, name), sizes, begin, count, flat, start));
    for (const auto& [key, item] : below(optimizer_file(rank), state)) {
      const bool is_of_elements = item->is_tensor && item->tensor.sizes.size() == 1;
      if (!is_of_elements || item->tensor.sizes[0] < flat.tensor.sizes[0]) continue;
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
        for (const auto& [name, item] : slices) {
          Fragment fragment;
          if (shapes_.count(name) == 0 || !read_fragment(pickle_of(*item), &fragment)) {
            return corrupt(text(step_.optimizers[rank], " has a part of '", name, "', which cannot be read"));
          }
          int64_t& done = done_[name];
          BCP_RETURN_IF_ERROR(add_part(name, done, fragment.numel, rank, *flat,
                                       text(kOfOptimizer, "base_optimizer_state.state.", group, "."), fragment.start));
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
        BCP_RETURN_IF_ERROR(add_part(name, begin, count, rank, *flat,
                                     text(kOfOptimizer, "optimizer_state_dict.state.", group, "."), start));
        done_[name] += count;
        start += part;
      }
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
      if (shapes_.count(name) != 0) continue;
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
        refuse(full);
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

  void refuse(const std::string& name) {
    Item& item = made_[name];
    item.chunks.resize(1);
    refused_.emplace_back(name,
                          text("'", name, "' cannot be read: the module has a placeholder of ZeRO-3, and no rank ",
                               "says what it shares"));
  }

  /// Adds what is of no parameter, as rank 0 has it.
  void add_others() {
    constexpr std::string_view kKnown[] = {kModule, "param_shapes.", "frozen_param_", "shared_params."};
    for (const uint32_t file : {uint32_t{0}, optimizer_file(0)}) {
      for (const auto& [name, item] : below(file, "")) {
        const bool is_known = std::any_of(
            std::begin(kKnown), std::end(kKnown),
            [&, &known = name](std::string_view begin) { return known.compare(0, begin.size(), begin) == 0; });
        const bool is_flat = item->is_tensor && !item->tensor.sizes.empty();
        if (!is_known && !is_flat && name.find("param_slice_mappings.") == std::string::npos)
          made_.emplace(name, *item);
      }
    }
  }

  const StepFiles& step_;
  const format::Manifest& read_;
  std::map<std::pair<uint32_t, std::string>, const Item*> items_;  // by file and name
  std::vector<std::string> order_;
  std::map<std::string, Shape> shapes_;
  std::map<std::string, int64_t> done_;  // elements of each parameter that were added
  std::map<std::string, Item> made_;
  std::vector<std::pair<std::string, std::string>> refused_;
  bool is_stage_3_ = false;
};

/// Reads the name of the step that `latest` names; "" if it names none.
base::Result<std::string> latest_in(const std::string& directory) {
  // Others have a link or a folder of this name.
  BCP_ASSIGN_OR_RETURN(const io::EntryType type, io::entry_type(io::join(directory, "latest")));
  if (type != io::EntryType::kRegular) return std::string();
  BCP_ASSIGN_OR_RETURN(io::File file, io::File::open(directory, "latest", /*direct=*/false));
  BCP_ASSIGN_OR_RETURN(const int64_t size, file.size());
  BCP_ASSIGN_OR_RETURN(std::string name, file.read(0, std::min(size, kMostNameBytes)));
  while (!name.empty() && (name.back() == '\n' || name.back() == ' ')) name.pop_back();
  const bool is_name = name.find('/') == std::string::npos && name != "." && name != "..";
  return is_name ? name : std::string();
}

/// Returns names by rank. \returns kCorrupt if one is missing before another.
base::Result<std::vector<std::string>> in_order(const std::map<int, std::string>& names, const std::string& path) {
  std::vector<std::string> found;
  for (const auto& [rank, name] : names) {
    if (rank != static_cast<int>(found.size())) {
      return Status::make(Code::kCorrupt,
                          text("open(", path, "): the file of rank ", found.size(), " is missing, beside ", name), path,
                          ENOENT);
    }
    found.push_back(name);
  }
  return found;
}

/// \param is_run  Whether it may be the folder of a run.
base::Result<StepFiles> find_step(const std::string& path, bool is_run) {
  BCP_ASSIGN_OR_RETURN(const std::vector<std::string> listed, names_to_search(path, kWhatOfDeepSpeed));
  std::map<int, std::string> models, optimizers;
  bool has_latest = false;
  for (const std::string& name : listed) {
    has_latest |= name == "latest";
    const std::optional<ZeroFile> file = parse_zero_file(name);
    if (!file.has_value()) continue;
    if (file->model_rank != 0) {
      return Status::make(Code::kUnsupported,
                          text("open(", path, "): ", name, " is of another rank of tensor or pipeline parallelism; ",
                               "these are not joined: convert them by the library that trained"),
                          path);
    }
    const auto [other, is_first] = (file->is_of_optimizer ? optimizers : models).emplace(file->rank, name);
    if (is_first) continue;
    return Status::make(Code::kUnsupported,
                        text("open(", path, "): both ", other->second, " and ", name, " are of rank ", file->rank),
                        path);
  }
  if (models.empty() && optimizers.empty() && has_latest && is_run) {
    BCP_ASSIGN_OR_RETURN(const std::string name, latest_in(path));
    return name.empty() ? no_checkpoint(path, kWhatOfDeepSpeed) : find_step(io::join(path, name), /*is_run=*/false);
  }
  if (models.empty() || optimizers.empty()) return no_checkpoint(path, kWhatOfDeepSpeed);
  StepFiles step{path, {}, {}};
  BCP_ASSIGN_OR_RETURN(step.models, in_order(models, path));
  BCP_ASSIGN_OR_RETURN(step.optimizers, in_order(optimizers, path));
  return step;
}

}  // namespace

base::Result<format::Manifest> open_deepspeed(const std::string& path) {
  BCP_ASSIGN_OR_RETURN(const StepFiles step, find_step(path, /*is_run=*/true));
  ModelFiles files{step.directory, step.models, {}, {}, {}, {}};
  files.names.insert(files.names.end(), step.optimizers.begin(), step.optimizers.end());
  files.stored = files.names;
  BCP_ASSIGN_OR_RETURN(format::Manifest manifest, read_torch_files(files));
  ZeroReader reader(step, manifest);
  BCP_RETURN_IF_ERROR(reader.run());
  reader.say_refusals(&*manifest.foreign);
  manifest.items = reader.take_items();
  manifest.planner_data = {};
  manifest.foreign->format = "torch";
  if (step.directory != path) manifest.foreign->directory = step.directory;
  return manifest;
}

}  // namespace bytecheckpoint::engine
