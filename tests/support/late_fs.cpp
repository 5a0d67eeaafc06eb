// SPDX-License-Identifier: Apache-2.0
//
// A file system in memory with two mounts, as two machines see one server that shows each of them late what the other
// one does. It serves until MOUNT_A is unmounted.
//
//   late_fs MOUNT_A MOUNT_B [create=S] [rename=S] [unlink=S] [size=S] [of=a|b] [unflushed] [blind=SUFFIX,...:N]
//
//   create, rename, unlink, size   how many seconds late the other machine sees one; 0 is at once
//   of=a                           only what A does is seen late; without it what both do
//   unflushed                      a file is on the server once it was flushed, synced or closed; whatever is written
//                                  to a file that the other machine has removed creates it anew when it is flushed
//   blind=SUFFIX,...:N             the first N listings of the other machine do not show what is new under a name that
//                                  ends so
//
// Each mount has a view of the names, which its own changes reach at once. What the other one does reaches it when it
// is due, kind by kind and so in any order, or when it lists a directory. What is late in the cache of a kernel, the
// size, is left to that cache. Every request runs alone.
#define FUSE_USE_VERSION 31
#include <fuse3/fuse.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

struct Node {
  ino_t number = 0;
  mode_t mode = 0;
  std::string bytes;
  timespec changed{};
  bool on_server = true;
  std::array<std::string, 2> names;  // as each machine knows it; empty: it does not, or has removed it
};
using NodePtr = std::shared_ptr<Node>;
using Names = std::map<std::string, NodePtr>;

enum class Kind { kCreate, kRename, kUnlink };

/// What the other machine is still to see.
struct Change {
  Clock::time_point due;
  std::string gone, there;  // names that it takes away and gives; empty: none
  NodePtr node;
};

struct Machine {
  Names view;
  std::vector<Change> pending;
  std::map<std::string, int> blind;  // how many listings are still to lack a name
  bool is_shown_late = true;         // what this machine does is
};

struct World {
  std::mutex mutex;
  Names server;
  std::array<Machine, 2> machines;
  std::array<double, 3> delays{};
  double size_s = 0;
  bool unflushed = false;
  std::vector<std::string> blind_suffixes;
  int blind_listings = 0;
  ino_t next_number = 2;
};

World world;

int number_of_machine() {
  return static_cast<int>(reinterpret_cast<intptr_t>(fuse_get_context()->private_data));
}

Machine& this_machine() {
  return world.machines[number_of_machine()];
}

timespec now() {
  timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  return time;
}

NodePtr make_node(mode_t mode) {
  auto node = std::make_shared<Node>();
  node->number = world.next_number++;
  node->mode = mode;
  node->changed = now();
  return node;
}

void apply(Names* view, const Change& change) {
  if (const auto found = view->find(change.gone); found != view->end() && found->second == change.node)
    view->erase(found);
  if (!change.there.empty()) (*view)[change.there] = change.node;
}

bool ends_with(const std::string& name, const std::string& end) {
  return name.size() >= end.size() && name.compare(name.size() - end.size(), end.size(), end) == 0;
}

/// Tells the other machine of a change on the server.
void tell(Kind kind, const std::string& gone, const std::string& there, const NodePtr& node) {
  Machine& other = world.machines[1 - number_of_machine()];
  const double delay_s = this_machine().is_shown_late ? world.delays[static_cast<int>(kind)] : 0;
  const auto due = Clock::now() + std::chrono::duration_cast<Clock::duration>(Seconds(delay_s));
  other.pending.push_back({due, gone, there, node});
  if (kind == Kind::kUnlink || !this_machine().is_shown_late) return;
  for (const std::string& suffix : world.blind_suffixes) {
    if (ends_with(there, suffix)) other.blind[there] = world.blind_listings;
  }
}

/// Brings the view of this machine up to date: with what is due, or with all that the server has.
void look(bool at_all) {
  Machine& machine = this_machine();
  std::vector<Change> left;
  for (const Change& change : machine.pending) {
    const bool is_hidden = machine.blind.count(change.there) != 0;
    if (!is_hidden && (at_all || change.due <= Clock::now())) {
      apply(&machine.view, change);
    } else {
      left.push_back(change);
    }
  }
  machine.pending = std::move(left);
  if (!at_all) return;
  Names fresh = world.server;
  for (const auto& [path, node] : machine.view) {
    if (!node->on_server) fresh.emplace(path, node);
  }
  for (auto hidden = machine.blind.begin(); hidden != machine.blind.end();) {
    const auto known = machine.view.find(hidden->first);
    fresh.erase(hidden->first);
    if (known != machine.view.end()) fresh.insert(*known);
    hidden = --hidden->second <= 0 ? machine.blind.erase(hidden) : std::next(hidden);
  }
  machine.view = std::move(fresh);
}

NodePtr find(const char* path) {
  look(false);
  const Names& view = this_machine().view;
  const auto found = view.find(path);
  return found == view.end() ? nullptr : found->second;
}

void create_on_server(const std::string& path, const NodePtr& node) {
  node->on_server = true;
  world.server[path] = node;
  tell(Kind::kCreate, "", path, node);
}

/// Flushes a file: the server then has it, unless this machine has removed it.
void flush_node(const NodePtr& node) {
  const std::string& path = node->names[number_of_machine()];
  if (!world.unflushed || path.empty()) return;
  const auto found = world.server.find(path);
  if (found == world.server.end() || found->second != node) create_on_server(path, node);
}

struct Handle {
  NodePtr node;
  bool is_written = false;
};

Handle& handle_of(const fuse_file_info* info) {
  return *reinterpret_cast<Handle*>(info->fh);
}

void fill(const NodePtr& node, struct stat* info) {
  *info = {};
  info->st_ino = node->number;
  info->st_mode = node->mode;
  info->st_nlink = S_ISDIR(node->mode) ? 2 : 1;
  info->st_size = static_cast<off_t>(node->bytes.size());
  info->st_mtim = info->st_ctim = info->st_atim = node->changed;
  info->st_uid = getuid();
  info->st_gid = getgid();
}

using Lock = std::lock_guard<std::mutex>;

int do_getattr(const char* path, struct stat* info, fuse_file_info* open) {
  const Lock lock(world.mutex);
  const NodePtr node = open != nullptr ? handle_of(open).node : find(path);
  if (node == nullptr) return -ENOENT;
  fill(node, info);
  return 0;
}

int do_readdir(const char* path, void* buffer, fuse_fill_dir_t add, off_t, fuse_file_info*, fuse_readdir_flags) {
  const Lock lock(world.mutex);
  look(true);
  const std::string prefix = std::strcmp(path, "/") == 0 ? "/" : std::string(path) + "/";
  for (const auto& [name, node] : this_machine().view) {
    const bool is_here = name.size() > prefix.size() && name.compare(0, prefix.size(), prefix) == 0 &&
                         name.find('/', prefix.size()) == std::string::npos;
    if (is_here) add(buffer, name.c_str() + prefix.size(), nullptr, 0, static_cast<fuse_fill_dir_flags>(0));
  }
  return 0;
}

void open_handle(const char* path, NodePtr node, fuse_file_info* info) {
  node->names[number_of_machine()] = path;
  info->fh = reinterpret_cast<uint64_t>(new Handle{std::move(node)});
}

int do_create(const char* path, mode_t mode, fuse_file_info* info) {
  const Lock lock(world.mutex);
  if (find(path) != nullptr || (!world.unflushed && world.server.count(path) != 0)) return -EEXIST;
  NodePtr node = make_node(S_IFREG | mode);
  this_machine().view[path] = node;
  if (world.unflushed) {
    node->on_server = false;
  } else {
    create_on_server(path, node);
  }
  open_handle(path, std::move(node), info);
  return 0;
}

int do_open(const char* path, fuse_file_info* info) {
  const Lock lock(world.mutex);
  NodePtr node = find(path);
  if (node == nullptr) return -ENOENT;
  if ((info->flags & O_TRUNC) != 0) node->bytes.clear();
  open_handle(path, std::move(node), info);
  return 0;
}

int do_read(const char*, char* buffer, size_t size, off_t offset, fuse_file_info* info) {
  const Lock lock(world.mutex);
  const std::string& bytes = handle_of(info).node->bytes;
  if (static_cast<size_t>(offset) >= bytes.size()) return 0;
  const size_t count = std::min(size, bytes.size() - static_cast<size_t>(offset));
  std::memcpy(buffer, bytes.data() + offset, count);
  return static_cast<int>(count);
}

int do_write(const char*, const char* buffer, size_t size, off_t offset, fuse_file_info* info) {
  const Lock lock(world.mutex);
  Node& node = *handle_of(info).node;
  const size_t end = static_cast<size_t>(offset) + size;
  if (node.bytes.size() < end) node.bytes.resize(end);
  std::memcpy(node.bytes.data() + offset, buffer, size);
  node.changed = now();
  handle_of(info).is_written = true;
  return static_cast<int>(size);
}

int do_truncate(const char* path, off_t size, fuse_file_info* info) {
  const Lock lock(world.mutex);
  const NodePtr node = info != nullptr ? handle_of(info).node : find(path);
  if (node == nullptr) return -ENOENT;
  node->bytes.resize(static_cast<size_t>(size));
  node->changed = now();
  return 0;
}

int do_flush(const char*, fuse_file_info* info) {
  const Lock lock(world.mutex);
  Handle& handle = handle_of(info);
  // A file that was flushed and has not changed since is not sent again.
  if (handle.is_written || !handle.node->on_server) flush_node(handle.node);
  handle.is_written = false;
  return 0;
}

int do_fsync(const char* path, int, fuse_file_info* info) {
  return do_flush(path, info);
}

int do_release(const char*, fuse_file_info* info) {
  const Lock lock(world.mutex);
  delete &handle_of(info);
  return 0;
}

int do_unlink(const char* path) {
  const Lock lock(world.mutex);
  const NodePtr known = find(path);
  if (known != nullptr) known->names[number_of_machine()].clear();
  this_machine().view.erase(path);
  const auto found = world.server.find(path);
  if (found == world.server.end()) return known != nullptr && !known->on_server ? 0 : -ENOENT;
  const NodePtr node = found->second;
  world.server.erase(found);
  tell(Kind::kUnlink, path, "", node);
  return 0;
}

int do_rename(const char* from, const char* to, unsigned int flags) {
  const Lock lock(world.mutex);
  if (flags > 1) return -EINVAL;
  if (const NodePtr own = find(from); own != nullptr && !own->on_server) create_on_server(from, own);
  const auto found = world.server.find(from);
  if (found == world.server.end()) return -ENOENT;
  if (flags == 1 && world.server.count(to) != 0) return -EEXIST;
  const NodePtr node = found->second;
  node->names[number_of_machine()] = to;
  Machine& machine = this_machine();
  const std::string below = std::string(from) + "/";
  for (Names* names : {&world.server, &machine.view}) {
    names->erase(from);
    (*names)[to] = node;
    Names moved;
    for (auto each = names->lower_bound(below);
         each != names->end() && each->first.compare(0, below.size(), below) == 0;) {
      moved[std::string(to) + "/" + each->first.substr(below.size())] = each->second;
      each = names->erase(each);
    }
    names->insert(moved.begin(), moved.end());
  }
  tell(Kind::kRename, from, to, node);
  return 0;
}

int do_mkdir(const char* path, mode_t mode) {
  const Lock lock(world.mutex);
  if (find(path) != nullptr || world.server.count(path) != 0) return -EEXIST;
  const NodePtr node = make_node(S_IFDIR | mode);
  this_machine().view[path] = node;
  create_on_server(path, node);
  return 0;
}

int do_rmdir(const char* path) {
  const Lock lock(world.mutex);
  const std::string below = std::string(path) + "/";
  const auto next = world.server.lower_bound(below);
  if (next != world.server.end() && next->first.compare(0, below.size(), below) == 0) return -ENOTEMPTY;
  const auto found = world.server.find(path);
  this_machine().view.erase(path);
  if (found == world.server.end()) return -ENOENT;
  const NodePtr node = found->second;
  world.server.erase(found);
  tell(Kind::kUnlink, path, "", node);
  return 0;
}

/// Sets all times of a file, also that of its last change.
int do_utimens(const char* path, const timespec* times, fuse_file_info*) {
  const Lock lock(world.mutex);
  const NodePtr node = find(path);
  if (node == nullptr) return -ENOENT;
  node->changed = times[1].tv_nsec == UTIME_NOW ? now() : times[1];
  return 0;
}

void* do_init(fuse_conn_info*, fuse_config* config) {
  config->use_ino = 1;
  config->entry_timeout = config->negative_timeout = 0;
  config->attr_timeout = world.size_s;
  config->hard_remove = 1;
  config->nullpath_ok = 0;
  return fuse_get_context()->private_data;
}

/// Mounts for one machine. \returns null if that is not possible.
fuse* mount(intptr_t machine, char* program, const char* mount_point) {
  fuse_operations operations{};
  operations.init = do_init;
  operations.getattr = do_getattr;
  operations.readdir = do_readdir;
  operations.create = do_create;
  operations.open = do_open;
  operations.read = do_read;
  operations.write = do_write;
  operations.truncate = do_truncate;
  operations.flush = do_flush;
  operations.fsync = do_fsync;
  operations.release = do_release;
  operations.unlink = do_unlink;
  operations.rename = do_rename;
  operations.mkdir = do_mkdir;
  operations.rmdir = do_rmdir;
  operations.utimens = do_utimens;
  char* arguments[] = {program, nullptr};
  fuse_args args{1, arguments, 0};
  fuse* mounted = fuse_new(&args, &operations, sizeof operations, reinterpret_cast<void*>(machine));
  return mounted != nullptr && fuse_mount(mounted, mount_point) == 0 ? mounted : nullptr;
}

bool read_option(const std::string& option) {
  const size_t equals = option.find('=');
  const std::string name = option.substr(0, equals), value = equals == option.npos ? "" : option.substr(equals + 1);
  if (name == "create")
    world.delays[0] = std::stod(value);
  else if (name == "rename")
    world.delays[1] = std::stod(value);
  else if (name == "unlink")
    world.delays[2] = std::stod(value);
  else if (name == "size")
    world.size_s = std::stod(value);
  else if (name == "of")
    world.machines[value == "a" ? 1 : 0].is_shown_late = false;
  else if (name == "unflushed")
    world.unflushed = true;
  else if (name == "blind") {
    std::stringstream suffixes(value.substr(0, value.rfind(':')));
    for (std::string suffix; std::getline(suffixes, suffix, ',');) world.blind_suffixes.push_back(suffix);
    world.blind_listings = std::stoi(value.substr(value.rfind(':') + 1));
  } else
    return false;
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: late_fs MOUNT_A MOUNT_B [OPTION...]\n");
    return 2;
  }
  for (int i = 3; i < argc; ++i) {
    if (!read_option(argv[i])) {
      std::fprintf(stderr, "late_fs: no such option: %s\n", argv[i]);
      return 2;
    }
  }
  auto root = make_node(S_IFDIR | 0755);
  world.server["/"] = root;
  for (Machine& machine : world.machines) machine.view["/"] = root;
  // Whoever sees A mounted relies on B.
  fuse* const b = mount(1, argv[0], argv[2]);
  fuse* const a = b == nullptr ? nullptr : mount(0, argv[0], argv[1]);
  if (a == nullptr) return 1;
  std::thread serves_b([b] { fuse_loop(b); });
  const int outcome = fuse_loop(a);
  fuse_unmount(b);  // ends its loop
  serves_b.join();
  return outcome;
}
