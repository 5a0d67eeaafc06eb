// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

/// Pieces of pickles as bytes, to build pickles that no pickler would write.
namespace bytecheckpoint::test::pickled {

/// Every opcode of protocol 5.
inline constexpr std::string_view kOpcodes =
    "().012BCFGIJKLMNPQRSTUVX]abcdeghijlopqrstu}\x80\x81\x82\x83\x84\x85\x86\x87\x88\x89\x8A\x8B\x8C\x8D\x8E\x8F\x90"
    "\x91\x92\x93\x94\x95\x96\x97\x98";

template <class Number>
std::string little(Number number) {
  std::string bytes(sizeof number, '\0');
  std::memcpy(&bytes[0], &number, sizeof number);
  return bytes;
}
inline std::string text(std::string_view value) {
  return "X" + little(static_cast<uint32_t>(value.size())) + std::string(value);
}
inline std::string number(int64_t value) {
  return "\x8A\x08" + little(value);
}
inline std::string global(std::string_view module, std::string_view name) {
  return "c" + std::string(module) + "\n" + std::string(name) + "\n";
}
inline std::string tuple(std::initializer_list<std::string> values) {
  std::string bytes = "(";
  for (const std::string& value : values) bytes += value;
  return bytes + "t";
}
inline std::string list(std::initializer_list<std::string> values) {
  std::string bytes = "](";
  for (const std::string& value : values) bytes += value;
  return bytes + "e";
}
/// A dict with string keys.
inline std::string dict(std::initializer_list<std::pair<std::string, std::string>> entries) {
  std::string bytes = "}(";
  for (const auto& [key, value] : entries) bytes += text(key) + value;
  return bytes + "u";
}
/// The result of `callee(*args)`.
inline std::string call(const std::string& callee, const std::string& args) {
  return callee + args + "R";
}
/// An instance with its attributes.
inline std::string object(const std::string& type, const std::string& state) {
  return type + ")\x81" + state + "b";
}
inline std::string put(uint32_t index) {
  return "r" + little(index);
}
inline std::string get(uint32_t index) {
  return "j" + little(index);
}
inline std::string repeated(std::string_view part, size_t times) {
  std::string bytes;
  bytes.reserve(part.size() * times);
  for (size_t i = 0; i < times; ++i) bytes += part;
  return bytes;
}
/// A complete pickle.
inline std::string whole(const std::string& value) {
  return "\x80\x02" + value + ".";
}

}  // namespace bytecheckpoint::test::pickled
