// comppo_mcore._host: what has to run on the host before an op can.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>

#include "plan.h"

namespace py = pybind11;

namespace {

using Int64Array = py::array_t<int64_t, py::array::c_style>;

std::span<const int64_t> view(const Int64Array& array) { return {array.data(), std::size_t(array.size())}; }

// A table of plain int32 structs as an int32 array, [n, fields].
template <class Struct>
py::array_t<int32_t> table(const std::vector<Struct>& entries) {
  constexpr py::ssize_t kFields = sizeof(Struct) / sizeof(int32_t);
  py::array_t<int32_t> out({py::ssize_t(entries.size()), kFields});
  if (!entries.empty()) std::memcpy(out.mutable_data(), entries.data(), entries.size() * sizeof(Struct));
  return out;
}

py::tuple plan(const Int64Array& rows, const Int64Array& cu_seqlens, const Int64Array& prompt_lengths, int64_t num_keys,
               bool response_only, int64_t skip_first, std::optional<int64_t> window) {
  const comppo::host::Plan made = comppo::host::make_plan(view(rows), view(cu_seqlens), view(prompt_lengths), num_keys,
                                                          {response_only, skip_first, window});
  return py::make_tuple(table(made.rows), table(made.items),
                        py::array_t<int32_t>(py::ssize_t(made.blocks.size()), made.blocks.data()),
                        py::array_t<int64_t>(py::ssize_t(made.num_history.size()), made.num_history.data()));
}

}  // namespace

PYBIND11_MODULE(_host, m) {
  m.def("plan", &plan, py::kw_only(), py::arg("rows"), py::arg("cu_seqlens"), py::arg("prompt_lengths"),
        py::arg("num_keys"), py::arg("response_only"), py::arg("skip_first"), py::arg("window"),
        "The RowRange, WorkItem and block tables of comppo/plan.h as int32 arrays, and n_t by row as int64.");
}
