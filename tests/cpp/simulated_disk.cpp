// SPDX-License-Identifier: Apache-2.0
#include "tests/cpp/simulated_disk.h"

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <string_view>

namespace bytecheckpoint::test {
namespace {

using Kind = io::FileSystemChange::Kind;

constexpr size_t kSectorBytes = 512;
constexpr size_t kPageBytes = 4096;

uint64_t mixed(uint64_t hash, uint64_t with) {
  hash = (hash ^ with) * 0x9E3779B97F4A7C15u;
  return hash ^ (hash >> 29);
}

std::string parent_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "" : path.substr(0, slash);
}

size_t below(std::mt19937_64* random, size_t limit) {
  return (*random)() % limit;
}

std::string resized(const std::string& bytes, size_t size) {
  std::string out = bytes;
  out.resize(size, '\0');
  return out;
}

}  // namespace

Content content_of(std::string bytes) {
  const uint64_t hash = std::hash<std::string_view>()(bytes);
  return std::make_shared<const FileBytes>(FileBytes{std::move(bytes), hash});
}

uint64_t DiskTree::hash() const {
  const std::hash<std::string> of_name;
  uint64_t hash = 1;
  for (const std::string& path : directories) hash = mixed(hash, of_name(path));
  for (const auto& [path, content] : files) hash = mixed(mixed(hash, of_name(path)), content->hash);
  return hash;
}

SimulatedDisk::SimulatedDisk(std::string root, const DiskTree& durable) : root_(std::move(root)) {
  for (const std::string& path : durable.directories) set_name(path, add_node({true, {}}));
  for (const auto& [path, content] : durable.files) set_name(path, add_node({false, {content}}));
  for (auto& [path, values] : names_) values = {values.back()};
}

bool SimulatedDisk::is_below_root(const std::string& path) const {
  return path == root_ || path.compare(0, root_.size() + 1, root_ + "/") == 0;
}

std::string SimulatedDisk::relative(const std::string& path) const {
  if (!is_below_root(path)) throw std::logic_error("not below " + root_ + ": " + path);
  return path == root_ ? "" : path.substr(root_.size() + 1);
}

int SimulatedDisk::node_at(const std::string& path) const {
  const auto found = names_.find(path);
  if (found == names_.end() || found->second.back().node == kNothing) throw std::logic_error("nothing at " + path);
  return found->second.back().node;
}

int SimulatedDisk::add_node(Node node) {
  nodes_.push_back(std::move(node));
  return static_cast<int>(nodes_.size()) - 1;
}

void SimulatedDisk::set_name(const std::string& path, int node) {
  std::vector<Value>& values = names_[path];
  if (values.empty()) values.push_back({0, kNothing});
  values.push_back({time_, node});
}

const SimulatedDisk::Node& SimulatedDisk::file_of(uint64_t inode) const {
  return nodes_[static_cast<size_t>(node_of_inode_.at(inode))];
}

void SimulatedDisk::change_file(uint64_t inode, std::string bytes) {
  nodes_[static_cast<size_t>(node_of_inode_.at(inode))].versions.push_back(content_of(std::move(bytes)));
}

void SimulatedDisk::apply(const io::FileSystemChange& change) {
  ++time_;
  switch (change.kind) {
    case Kind::kCreateFile:
      node_of_inode_[change.file] = add_node({false, {content_of("")}});
      return set_name(relative(change.path), node_of_inode_[change.file]);
    case Kind::kWrite: {
      const std::string& before = file_of(change.file).versions.back()->bytes;
      const auto offset = static_cast<size_t>(change.offset);
      std::string after = resized(before, std::max(before.size(), offset + change.bytes.size()));
      after.replace(offset, change.bytes.size(), change.bytes);
      return change_file(change.file, std::move(after));
    }
    case Kind::kReserve:  // reserves space beyond the size, which stays
      return;
    case Kind::kTruncate:
      return change_file(change.file,
                         resized(file_of(change.file).versions.back()->bytes, static_cast<size_t>(change.offset)));
    case Kind::kSyncFile: {
      std::vector<Content>& versions = nodes_[static_cast<size_t>(node_of_inode_.at(change.file))].versions;
      versions = {versions.back()};
      return;
    }
    case Kind::kMakeDirectory:
      return set_name(relative(change.path), add_node({true, {}}));
    case Kind::kRename: {
      const int node = node_at(relative(change.path));
      set_name(relative(change.path), kNothing);
      return set_name(relative(change.to), node);
    }
    case Kind::kLink:
      return set_name(relative(change.to), node_at(relative(change.path)));
    case Kind::kRemoveFile:
      return set_name(relative(change.path), kNothing);
    case Kind::kSyncDirectory:
      if (!is_below_root(change.path)) return;
      for (auto& [path, values] : names_) {
        if (parent_of(path) == relative(change.path)) values = {values.back()};
      }
  }
}

template <class ValueOf, class ContentOf>
DiskTree SimulatedDisk::tree(ValueOf&& value_of, ContentOf&& content_of_file) const {
  DiskTree out;
  std::unordered_map<int, Content> contents;  // two names of one file show the same content
  for (const auto& [path, values] : names_) {
    const int node = value_of(values).node;
    const std::string parent = parent_of(path);
    if (node == kNothing || (!parent.empty() && out.directories.count(parent) == 0)) continue;
    const Node& found = nodes_[static_cast<size_t>(node)];
    if (found.is_directory) {
      out.directories.insert(path);
      continue;
    }
    Content& content = contents[node];
    if (content == nullptr) content = found.versions.size() == 1 ? found.versions[0] : content_of_file(node);
    out.files.emplace(path, content);
  }
  return out;
}

DiskTree SimulatedDisk::latest() const {
  return tree([](const std::vector<Value>& values) { return values.back(); },
              [&](int node) { return nodes_[static_cast<size_t>(node)].versions.back(); });
}

int64_t SimulatedDisk::num_landmarks() const {
  int64_t product = 1;
  const auto times = [&](size_t choices) {
    product = std::min(product * static_cast<int64_t>(choices), kManyLandmarks);
  };
  for (const auto& [path, values] : names_) times(values.size());
  for (const Node& node : nodes_) {
    if (node.versions.size() > 1) times(node.versions.size() + 1);
  }
  return product;
}

DiskTree SimulatedDisk::landmark(int64_t index) const {
  const auto digit = [&](size_t base) {
    const auto value = static_cast<size_t>(index % static_cast<int64_t>(base));
    index /= static_cast<int64_t>(base);
    return value;
  };
  // All files count in the index, including those that this tree does not show.
  std::vector<Content> contents;
  for (const Node& node : nodes_) {
    if (node.versions.empty()) {
      contents.push_back(nullptr);
      continue;
    }
    const size_t choice = node.versions.size() > 1 ? digit(node.versions.size() + 1) : 0;
    contents.push_back(choice < node.versions.size() ? node.versions[choice] : zeroed(node));
  }
  return tree([&](const std::vector<Value>& values) { return values[digit(values.size())]; },
              [&](int node) { return contents[static_cast<size_t>(node)]; });
}

Content SimulatedDisk::zeroed(const Node& node) const {
  return content_of(resized(node.versions.front()->bytes, node.versions.back()->bytes.size()));
}

Content SimulatedDisk::torn(const Node& node, std::mt19937_64* random) const {
  const std::vector<Content>& versions = node.versions;
  const size_t synced = versions.front()->bytes.size();
  size_t smallest = synced, largest = synced;
  for (const Content& version : versions) {
    smallest = std::min(smallest, version->bytes.size());
    largest = std::max(largest, version->bytes.size());
  }
  size_t size = versions[below(random, versions.size())]->bytes.size();
  if (below(random, 4) == 0) {
    size = smallest + below(random, largest - smallest + 1);
    size = std::clamp(size / kSectorBytes * kSectorBytes, smallest, largest);
  }
  const size_t unit = below(random, 4) == 0 ? kPageBytes : kSectorBytes;
  const size_t units = (size + unit - 1) / unit;
  // Half of the time nearly all sectors have arrived, because one missing sector is the hardest to notice.
  const bool nearly_whole = below(random, 2) == 0;
  const size_t lost = units == 0 ? 0 : below(random, units), more_lost = units == 0 ? 0 : below(random, 2 * units);
  const std::string& stale = [&]() -> const std::string& {
    const Node& other = nodes_[below(random, nodes_.size())];
    return other.versions.empty() ? versions.back()->bytes : other.versions.back()->bytes;
  }();
  std::string out(size, '\0');
  for (size_t u = 0; u < units; ++u) {
    const size_t begin = u * unit;
    size_t choice = versions.size() - 1;
    if (!nearly_whole || u == lost || u == more_lost) choice = below(random, versions.size() + 2);
    // A sector that was once on disk keeps the old value or gets the new one.
    if (choice >= versions.size() && begin < synced) choice = below(random, versions.size());
    if (choice == versions.size()) continue;
    const std::string& from = choice < versions.size() ? versions[choice]->bytes : stale;
    if (begin < from.size()) out.replace(begin, std::min({unit, size - begin, from.size() - begin}), from, begin, unit);
  }
  out.resize(size);
  return content_of(std::move(out));
}

DiskTree SimulatedDisk::random_tree(std::mt19937_64* random) const {
  const bool in_order = below(random, 4) == 0;
  int64_t earliest = 0;
  for (const auto& [path, values] : names_) earliest = std::max(earliest, values.front().time);
  const int64_t until = earliest + static_cast<int64_t>(below(random, static_cast<size_t>(time_ - earliest + 1)));
  const auto value_of = [&](const std::vector<Value>& values) {
    if (!in_order) return values[below(random, values.size())];
    Value last = values.front();
    for (const Value& value : values) {
      if (value.time <= until) last = value;
    }
    return last;
  };
  return tree(value_of, [&](int node) {
    const Node& file = nodes_[static_cast<size_t>(node)];
    return below(random, 4) == 0 ? file.versions[below(random, file.versions.size())] : torn(file, random);
  });
}

}  // namespace bytecheckpoint::test
