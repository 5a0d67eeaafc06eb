// SPDX-License-Identifier: Apache-2.0
#include "csrc/bindings/bind_pickle.h"

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "csrc/bindings/descent.h"
#include "csrc/bindings/errors.h"
#include "csrc/format/pickle_reader.h"
#include "csrc/format/pickle_tree.h"

namespace bytecheckpoint::bindings {
namespace {

namespace py = pybind11;
using format::PickleValue;
using Kind = PickleValue::Kind;

/// Builtin values as they are; all else as `make` makes it of its kind and its parts.
class PickleToPython {
 public:
  PickleToPython(const format::Pickle& pickle, const std::vector<py::tuple>& globals, size_t bytes, py::object make)
      : pickle_(pickle), globals_(globals), budget_(bytes), make_(std::move(make)) {}

  py::object convert(const PickleValue& value) {
    const Descent descent(" while making the values of a pickle");
    switch (value.kind) {
      case Kind::kHole:
      case Kind::kNone:
        return py::none();
      case Kind::kBool:
        return py::bool_(value.integer != 0);
      case Kind::kInt:
        return py::int_(value.integer);
      case Kind::kFloat:
        return py::float_(value.real);
      case Kind::kString:
        raise_if_error(budget_.take_text(value.size));
        return py::str(value.text().data(), value.size);
      case Kind::kBytes:
        raise_if_error(budget_.take_text(value.size));
        return py::bytes(value.text().data(), value.size);
      case Kind::kTuple:
      case Kind::kList:
      case Kind::kDict:
        return container(value);
      default:
        return object(value);
    }
  }

 private:
  py::object container(const PickleValue& value) {
    const format::PickleSpan children = pickle_.children(value);
    raise_if_error(budget_.take_values(children.size() + 1));
    if (value.is(Kind::kDict)) {
      py::dict dict;
      for (size_t i = 0; i < children.size(); i += 2) dict[convert(children[i])] = convert(children[i + 1]);
      return dict;
    }
    py::list list;
    for (const PickleValue& child : children) list.append(convert(child));
    return value.is(Kind::kTuple) ? py::object(py::tuple(list)) : py::object(list);
  }

  py::object object(const PickleValue& value) {
    raise_if_error(budget_.take_values(1));
    if (value.is(Kind::kGlobal)) return make_("global", *globals_[value.global]);
    const format::PickleObject& object = *pickle_.object(value);
    if (value.is(Kind::kPersistent)) return make_("persistent", convert(object.args));
    const py::object callee = make_("global", *globals_[object.global]);
    return make_(value.is(Kind::kObject) ? "object" : "call", callee, convert(object.args),
                 !object.state.is(Kind::kHole), convert(object.state));
  }

  const format::Pickle& pickle_;
  const std::vector<py::tuple>& globals_;
  format::UnfoldBudget budget_;
  py::object make_;
};

/// (value, bytes up to and with STOP, [(module, name) of each global in the order in which it was named]).
py::tuple read_pickle(const py::bytes& data, py::object make) {
  const std::string_view bytes(data);
  std::vector<py::tuple> globals;
  const format::PickleRules rules{[&](std::string_view module, std::string_view name) {
                                    globals.push_back(py::make_tuple(py::str(module), py::str(name)));
                                    return std::make_optional(static_cast<uint32_t>(globals.size() - 1));
                                  },
                                  true};
  const format::Pickle pickle = value_or_raise(format::read_pickle(bytes, rules));
  const py::object value = PickleToPython(pickle, globals, bytes.size(), std::move(make)).convert(pickle.root());
  py::list named;
  for (const py::tuple& global : globals) named.append(global);
  return py::make_tuple(value, pickle.end(), named);
}

}  // namespace

void bind_pickle(py::module_& m) {
  m.def("read_pickle", &read_pickle, py::arg("data"), py::arg("make"));
}

}  // namespace bytecheckpoint::bindings
