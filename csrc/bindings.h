// The parts of bindings.cpp that have files of their own.
#pragma once

#include <pybind11/pybind11.h>

void bind_windows(pybind11::module_ module);
