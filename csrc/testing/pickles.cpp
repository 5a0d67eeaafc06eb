// SPDX-License-Identifier: Apache-2.0
#include "csrc/testing/bindings.h"

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "csrc/bridge/errors.h"
#include "csrc/bridge/recursion_guard.h"
#include "csrc/format/pickle/pickle_reader.h"
#include "csrc/format/pickle/pickle_tree.h"

namespace bytecheckpoint::testing {
namespace {

namespace py = pybind11;
using namespace bridge;

using format::PickleValue;
using Kind = PickleValue::Kind;

/// Makes Python values from a pickle: builtin values as they are, all else by calling `make` with its kind and its
/// parts.
class PickleToPython {
 public:
  PickleToPython(const format::Pickle& pickle, const std::vector<py::tuple>& globals, py::object make)
      : pickle_(pickle), globals_(globals), budget_(pickle), make_(std::move(make)) {}

  py::object convert(const PickleValue& value) {
    const RecursionGuard descent(" while making the values of a pickle");
    switch (value.kind) {
      case Kind::kHole:
      case Kind::kNone:
        return py::none();
      case Kind::kBool:
        return py::bool_(value.is_true());
      case Kind::kInt:
        return py::int_(pickle_.integer(value));
      case Kind::kFloat:
        return py::float_(pickle_.real(value));
      case Kind::kString:
        return py::str(take_text(value));
      case Kind::kBytes:
        return py::bytes(take_text(value));
      case Kind::kTuple:
      case Kind::kList:
      case Kind::kDict:
        return container(value);
      default:
        return object(value);
    }
  }

 private:
  std::string_view take_text(const PickleValue& value) {
    const std::string_view text = pickle_.text(value);
    raise_if_error(budget_.take(text.size()));
    return text;
  }

  py::object container(const PickleValue& value) {
    const format::PickleSpan children = pickle_.children(value);
    raise_if_error(budget_.take(children.size() + 1));
    if (value.is(Kind::kDict)) {
      py::dict dict;
      for (auto child = children.begin(); child != children.end(); ++child) {
        const py::object key = convert(*child);
        ++child;
        dict[key] = convert(*child);
      }
      return dict;
    }
    py::list list;
    for (const PickleValue& child : children) list.append(convert(child));
    return value.is(Kind::kTuple) ? py::object(py::tuple(list)) : py::object(list);
  }

  py::object object(const PickleValue& value) {
    raise_if_error(budget_.take(1));
    if (value.is(Kind::kGlobal)) return make_("global", *globals_[value.global()]);
    const format::PickleObject object = *pickle_.object(value);
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

/// Returns (value, bytes up to and including STOP, [(module, name) of each global in the order in which it was named]).
py::tuple read_pickle(const py::bytes& data, py::object make) {
  const std::string_view bytes(data);
  std::vector<py::tuple> globals;
  const format::PickleRules rules{[&](std::string_view module, std::string_view name) {
                                    globals.push_back(py::make_tuple(py::str(module), py::str(name)));
                                    return std::make_optional(static_cast<uint32_t>(globals.size() - 1));
                                  },
                                  true};
  const format::Pickle pickle = value_or_raise(format::read_pickle(bytes, rules));
  const py::object value = PickleToPython(pickle, globals, std::move(make)).convert(pickle.root());
  py::list named;
  for (const py::tuple& global : globals) named.append(global);
  return py::make_tuple(value, pickle.end(), named);
}

}  // namespace

void bind_pickles(py::module_& m) {
  m.def("read_pickle", &read_pickle, py::arg("data"), py::arg("make"));
}

}  // namespace bytecheckpoint::testing
