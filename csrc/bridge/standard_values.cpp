// SPDX-License-Identifier: Apache-2.0
#include "csrc/bridge/standard_values.h"

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "csrc/base/utf8.h"
#include "csrc/bridge/recursion_guard.h"
#include "csrc/bridge/standard_tensors.h"
#include "csrc/tensor/dtype.h"

namespace bytecheckpoint::bridge {
namespace {

namespace py = pybind11;
using format::PickleObject;
using format::PickleSpan;
using format::PickleValue;
using Kind = PickleValue::Kind;
using Global = format::StandardGlobal;

/// Thrown if a value contains itself, and its type cannot.
struct SelfReference {};

/// Where a class or function is. For numpy, the newer place; the older ones are below.
struct Place {
  Global global;
  const char* module;
  const char* name;
};

constexpr Place kPlaces[] = {
    {Global::kByteArray, "builtins", "bytearray"},
    {Global::kBytes, "builtins", "bytes"},
    {Global::kSet, "builtins", "set"},
    {Global::kFrozenSet, "builtins", "frozenset"},
    {Global::kComplex, "builtins", "complex"},
    {Global::kRange, "builtins", "range"},
    {Global::kSlice, "builtins", "slice"},
    {Global::kBytesIO, "io", "BytesIO"},
    {Global::kDate, "datetime", "date"},
    {Global::kTime, "datetime", "time"},
    {Global::kDateTime, "datetime", "datetime"},
    {Global::kTimeDelta, "datetime", "timedelta"},
    {Global::kTimeZone, "datetime", "timezone"},
    {Global::kDecimal, "decimal", "Decimal"},
    {Global::kFraction, "fractions", "Fraction"},
    {Global::kUuid, "uuid", "UUID"},
    {Global::kPurePosixPath, "pathlib", "PurePosixPath"},
    {Global::kPosixPath, "pathlib", "PosixPath"},
    {Global::kPureWindowsPath, "pathlib", "PureWindowsPath"},
    {Global::kWindowsPath, "pathlib", "WindowsPath"},
    {Global::kOrderedDict, "collections", "OrderedDict"},
    {Global::kDefaultDict, "collections", "defaultdict"},
    {Global::kDeque, "collections", "deque"},
    {Global::kCounter, "collections", "Counter"},
    {Global::kSimpleNamespace, "types", "SimpleNamespace"},
    {Global::kNumpyDType, "numpy", "dtype"},
    {Global::kNumpyArray, "numpy", "ndarray"},
    {Global::kNumpyReconstruct, "numpy._core.multiarray", "_reconstruct"},
    {Global::kNumpyFromBuffer, "numpy", "frombuffer"},
    {Global::kNumpyScalar, "numpy._core.multiarray", "scalar"},
    {Global::kTorchSize, "torch", "Size"},
    {Global::kTorchDevice, "torch", "device"},
    {Global::kInt, "builtins", "int"},
    {Global::kFloat, "builtins", "float"},
    {Global::kBool, "builtins", "bool"},
    {Global::kStr, "builtins", "str"},
    {Global::kList, "builtins", "list"},
    {Global::kTuple, "builtins", "tuple"},
    {Global::kDict, "builtins", "dict"},
    {Global::kObject, "builtins", "object"},
};

py::object import_at(const Place& place) {
  const std::string module = place.module;
  constexpr std::string_view kOfNumpy2 = "numpy._core";
  if (module.rfind(kOfNumpy2, 0) == 0 && !py::hasattr(py::module_::import("numpy"), "_core")) {
    return py::module_::import(("numpy.core" + module.substr(kOfNumpy2.size())).c_str()).attr(place.name);
  }
  return py::module_::import(place.module).attr(place.name);
}

class StandardToPython {
 public:
  StandardToPython(const format::StandardArchive& archive, std::string_view bytes)
      : pickle_(archive.pickle), archive_(archive), tensors_(bytes) {}

  py::object convert(const PickleValue& value) {
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
      case Kind::kGlobal:
        return global(value.global());
      case Kind::kString:
      case Kind::kBytes:
      case Kind::kByteArray:
      case Kind::kLong:
        return once(&texts_, value, [&](py::object* made) { *made = scalar(value); });
      default:
        break;
    }
    const RecursionGuard descent(" while making the values of a pickle");
    if (value.at == 0) return container(value, nullptr);
    return once(&made_, value, [&](py::object* made) {
      const auto tensor = archive_.tensors.find(value.at);
      if (tensor != archive_.tensors.end()) {
        *made = tensors_.make(tensor->second);
      } else if (value.is(Kind::kObject) || value.is(Kind::kCall)) {
        object(*pickle_.object(value), made);
      } else {
        *made = container(value, made);
      }
    });
  }

 private:
  using Made = std::unordered_map<uint32_t, py::object>;

  /// Makes a value that is in several places once. `make` may set it before it is complete.
  template <class Make>
  static py::object once(Made* all, const PickleValue& value, Make&& make) {
    const auto [found, is_new] = all->try_emplace(value.at);
    py::object& made = found->second;
    if (is_new) make(&made);
    if (!made) throw SelfReference();
    return made;
  }

  py::object scalar(const PickleValue& value) const {
    const std::string_view text = pickle_.text(value);
    const auto size = static_cast<Py_ssize_t>(text.size());
    if (value.is(Kind::kString)) return py::str(text);
    if (value.is(Kind::kBytes)) return py::bytes(text);
    if (value.is(Kind::kByteArray)) {
      return py::reinterpret_steal<py::object>(or_raise(PyByteArray_FromStringAndSize(text.data(), size)));
    }
    static const py::handle int_type(reinterpret_cast<PyObject*>(&PyLong_Type));
    return int_type.attr("from_bytes")(py::bytes(text), "little", py::arg("signed") = true);
  }

  static PyObject* or_raise(PyObject* made) {
    if (made == nullptr) throw py::error_already_set();
    return made;
  }

  /// \param made  Set to a list, set or dict before it is filled, since it may contain itself.
  py::object container(const PickleValue& value, py::object* made) {
    const PickleSpan children = pickle_.children(value);
    if (value.is(Kind::kTuple)) return tuple(children);
    if (value.is(Kind::kFrozenSet)) {
      return py::reinterpret_steal<py::object>(or_raise(PyFrozenSet_New(tuple(children).ptr())));
    }
    py::object filled = value.is(Kind::kList)  ? py::object(py::list())
                        : value.is(Kind::kSet) ? py::object(py::set())
                                               : py::object(py::dict());
    if (made != nullptr) *made = filled;
    if (value.is(Kind::kDict)) {
      set_items(children, filled);
    } else {
      for (const PickleValue& child : children) {
        const py::object item = convert(child);
        const int failed =
            value.is(Kind::kList) ? PyList_Append(filled.ptr(), item.ptr()) : PySet_Add(filled.ptr(), item.ptr());
        if (failed != 0) throw py::error_already_set();
      }
    }
    return filled;
  }

  py::tuple tuple(const PickleSpan& children) {
    py::tuple values(children.size());
    size_t i = 0;
    for (const PickleValue& child : children) values[i++] = convert(child);
    return values;
  }

  py::list list(const PickleValue& value) {
    py::list values;
    for (const PickleValue& child : pickle_.children(value)) values.append(convert(child));
    return values;
  }

  void set_items(const PickleSpan& children, const py::object& filled) {
    for (auto child = children.begin(); child != children.end(); ++child) {
      const py::object key = convert(*child);
      ++child;
      filled[key] = convert(*child);
    }
  }

  py::object global(uint32_t number) {
    const auto first_dtype = static_cast<uint32_t>(Global::kTorchDType);
    if (number >= first_dtype) {
      const tensor::DTypeInfo* dtype = tensor::find_dtype(static_cast<uint8_t>(number - first_dtype));
      return py::module_::import("torch").attr(dtype->name);
    }
    if (globals_.empty()) globals_.resize(first_dtype);
    py::object& found = globals_[number];
    for (const Place& place : kPlaces) {
      if (!found && static_cast<uint32_t>(place.global) == number) found = import_at(place);
    }
    return found;
  }

  void object(const PickleObject& object, py::object* made) {
    const PickleSpan args = pickle_.children(object.args), state = pickle_.children(object.state);
    switch (static_cast<Global>(object.global)) {
      case Global::kEncode:
        *made = latin1(args[0]);
        return;
      case Global::kByteArray:
        *made = args.size() == 2 ? global(object.global)(latin1(args[0])) : global(object.global)(*tuple(args));
        return;
      case Global::kDate:
      case Global::kTime:
      case Global::kDateTime:
        *made = moment(static_cast<Global>(object.global), args);
        return;
      case Global::kSet:
      case Global::kFrozenSet:
        *made = global(object.global)(list(args[0]));
        return;
      case Global::kCounter:
        *made = counter(args);
        return;
      case Global::kBytesIO:
        *made = global(object.global)(convert(state[0]));
        made->attr("seek")(convert(state[1]));
        return;
      case Global::kUuid:
        *made = uuid(state);
        return;
      case Global::kSimpleNamespace:
        *made = global(object.global)();
        set_items(state, made->attr("__dict__"));
        return;
      case Global::kNumpyDType:
        *made = global(object.global)(py::str(pickle_.text(state[1])) + py::str(pickle_.text(args[0])));
        return;
      case Global::kNumpyReconstruct: {
        const py::object array = global(object.global)(global(static_cast<uint32_t>(Global::kNumpyArray)),
                                                       py::make_tuple(0), py::bytes("b"));
        array.attr("__setstate__")(tuple(state));
        *made = array;
        return;
      }
      case Global::kNumpyFromBuffer:
        *made = global(object.global)(convert(args[0]), py::arg("dtype") = convert(args[1]))
                    .attr("reshape")(convert(args[2]), py::arg("order") = convert(args[3]));
        return;
      default:
        *made = global(object.global)(*tuple(args));
        fill(object.items, *made);
    }
  }

  /// Fills an OrderedDict, defaultdict or deque.
  void fill(const PickleValue& items, const py::object& made) {
    if (items.is(Kind::kDict)) set_items(pickle_.children(items), made);
    if (!items.is(Kind::kList)) return;
    const py::object append = made.attr("append");
    for (const PickleValue& item : pickle_.children(items)) append(convert(item));
  }

  py::object counter(const PickleSpan& args) {
    const py::object type = global(static_cast<uint32_t>(Global::kCounter));
    if (args.size() == 0) return type();
    const py::dict counts;
    set_items(pickle_.children(args[0]), counts);
    return type(counts);
  }

  py::bytes latin1(const PickleValue& value) const {
    std::string bytes;
    (void)base::utf8_to_latin1(pickle_.text(value), &bytes);
    return py::bytes(bytes);
  }

  py::object uuid(const PickleSpan& state) {
    py::dict given;
    set_items(state, given);
    if (given.contains("is_safe")) given["is_safe"] = py::module_::import("uuid").attr("SafeUUID")(given["is_safe"]);
    return global(static_cast<uint32_t>(Global::kUuid))(**given);
  }

  /// Makes a date or time from its fields, which the constructor checks. Of the packed bytes it would check only the
  /// month.
  py::object moment(Global kind, const PickleSpan& args) {
    const std::string packed(py::bytes(convert(args[0])));
    const size_t wanted = kind == Global::kDate ? 4 : kind == Global::kTime ? 6 : 10;
    if (packed.size() != wanted) throw py::value_error("the packed bytes of a date or time have a wrong length");
    const auto at = [&](size_t i) { return static_cast<int>(static_cast<uint8_t>(packed[i])); };
    py::dict fields;
    if (kind != Global::kTime) {
      fields["year"] = at(0) * 256 + at(1);
      fields["month"] = at(2) & (kind == Global::kDate ? 0xFF : 0x7F);
      fields["day"] = at(3);
    }
    if (kind != Global::kDate) {
      const size_t first = wanted - 6;  // where the time begins
      fields["hour"] = kind == Global::kTime ? at(first) & 0x7F : at(first);
      fields["minute"] = at(first + 1);
      fields["second"] = at(first + 2);
      fields["microsecond"] = at(first + 3) * 65536 + at(first + 4) * 256 + at(first + 5);
      fields["fold"] = at(kind == Global::kTime ? first : 2) >> 7;
      if (args.size() == 2) fields["tzinfo"] = convert(args[1]);
    }
    return global(static_cast<uint32_t>(kind))(**fields);
  }

  const format::Pickle& pickle_;
  const format::StandardArchive& archive_;
  StandardTensors tensors_;
  Made made_, texts_;  // made_: by cell; texts_: by byte of the pickle
  std::vector<py::object> globals_;
};

}  // namespace

std::optional<py::object> standard_to_python(const format::StandardArchive& archive, std::string_view bytes) {
  try {
    return StandardToPython(archive, bytes).convert(archive.pickle.root());
  } catch (const SelfReference&) {
    return std::nullopt;
  } catch (const py::builtin_exception&) {
    return std::nullopt;
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_Exception) || error.matches(PyExc_MemoryError)) throw;
    return std::nullopt;
  }
}

}  // namespace bytecheckpoint::bridge
