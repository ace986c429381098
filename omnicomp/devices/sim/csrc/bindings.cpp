// What Python sees of the driver: a handful of functions, written against Python itself to keep the build short.
#include <torch/csrc/Generator.h> // brings Python.h, which has to come first

#include "generator.h"
#include "runtime.h"

#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/engine.h>

#include <thread>

namespace sim {
namespace {

// Autograd makes one thread for each index of any accelerator at the first backward of the process. If that came before
// this device was there, its threads are missing; they are made here, just as the engine does it. What is needed for it
// is protected, which is why this is a class.
struct Engine : torch::autograd::Engine {
  static void complete() {
    auto& engine = torch::autograd::Engine::get_default_engine();
    engine.initialize_device_threads_pool();
    auto& queues = engine.*(&Engine::device_ready_queues_);
    while (queues.size() < size_t(device_count())) {
      queues.push_back(std::make_shared<torch::autograd::ReadyQueue>());
      std::thread(&torch::autograd::Engine::thread_init, &engine, int(queues.size() - 1), queues.back(), true).detach();
    }
  }
};

// The new threads wait for Python's lock, so it must not be held meanwhile.
void on_first_use() {
  PyThreadState* held = PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr;
  try {
    Engine::complete();
  } catch (...) {
    if (held != nullptr) {
      PyEval_RestoreThread(held);
    }
    throw;
  }
  if (held != nullptr) {
    PyEval_RestoreThread(held);
  }
}

PyObject* raise(const char* type, const std::exception& error) {
  if (PyObject* torch = PyImport_ImportModule("torch")) {
    if (PyObject* cls = PyObject_GetAttrString(torch, type)) {
      const auto* own = dynamic_cast<const c10::Error*>(&error);
      PyErr_SetString(cls, own != nullptr ? own->what_without_backtrace() : error.what());
      Py_DECREF(cls);
    }
    Py_DECREF(torch);
  }
  return nullptr;
}

// A function of integers and strings, with C++ exceptions as Python's.
template <typename F>
PyObject* guarded(F function) {
  try {
    return function();
  } catch (const c10::AcceleratorError& error) {
    return raise("AcceleratorError", error);
  } catch (const c10::OutOfMemoryError& error) {
    return raise("OutOfMemoryError", error);
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

bool read_index(PyObject* argument, int& index) {
  index = int(PyLong_AsLong(argument));
  return !PyErr_Occurred();
}

void put(PyObject* dict, const std::string& key, PyObject* value) {
  PyDict_SetItemString(dict, key.c_str(), value);
  Py_DECREF(value);
}

PyObject* to_dict(const std::map<std::string, int64_t>& counts) {
  PyObject* result = PyDict_New();
  for (const auto& [key, value] : counts) {
    put(result, key, PyLong_FromLongLong(value));
  }
  return result;
}

PyObject* py_device_count(PyObject*, PyObject*) {
  return guarded([] { return PyLong_FromLong(device_count()); });
}
PyObject* py_current_device(PyObject*, PyObject*) {
  return guarded([] { return PyLong_FromLong(current_device()); });
}
PyObject* py_exchange_device(PyObject*, PyObject* argument) {
  int index = 0;
  if (!read_index(argument, index)) {
    return nullptr;
  }
  return guarded([&] { return PyLong_FromLong(exchange_device(c10::DeviceIndex(index))); });
}
PyObject* py_protected(PyObject*, PyObject*) {
  return PyBool_FromLong(settings().protect);
}
PyObject* py_total_memory(PyObject*, PyObject*) {
  return PyLong_FromSize_t(settings().memory);
}
PyObject* py_default_generator(PyObject*, PyObject* argument) {
  int index = 0;
  if (!read_index(argument, index)) {
    return nullptr;
  }
  return guarded([&] { return THPGenerator_Wrap(default_generator(c10::DeviceIndex(index))); });
}
PyObject* py_counters(PyObject*, PyObject*) {
  const auto c = counters();
  PyObject* result = to_dict(
      {{"h2d_copies", c.h2d_copies}, {"h2d_bytes", c.h2d_bytes}, {"d2h_copies", c.d2h_copies},
       {"d2h_bytes", c.d2h_bytes}, {"d2d_copies", c.d2d_copies}, {"d2d_bytes", c.d2d_bytes}, {"kernels", c.kernels},
       {"launches", c.launches}, {"synchronizations", c.synchronizations}});
  put(result, "natives", to_dict(c.natives));
  put(result, "fallbacks", to_dict(c.fallbacks));
  return result;
}
PyObject* py_reset_counters(PyObject*, PyObject*) {
  reset_counters();
  Py_RETURN_NONE;
}
PyObject* py_reset_fallbacks(PyObject*, PyObject*) {
  reset_fallbacks();
  Py_RETURN_NONE;
}
PyObject* py_inject_fault(PyObject*, PyObject* arguments) {
  int kind = 0;
  long long after = 0;
  if (!PyArg_ParseTuple(arguments, "iL", &kind, &after)) {
    return nullptr;
  }
  inject_fault(static_cast<Fault>(kind), after);
  Py_RETURN_NONE;
}
PyObject* py_set_dtypes(PyObject*, PyObject* dtypes) {
  uint64_t mask = 0;
  PyObject* items = PySequence_Fast(dtypes, "expected a sequence of dtypes");
  for (Py_ssize_t i = 0; items != nullptr && i < PySequence_Fast_GET_SIZE(items); i++) {
    PyObject* item = PySequence_Fast_GET_ITEM(items, i);
    if (!THPDtype_Check(item)) {
      PyErr_SetString(PyExc_TypeError, "expected a sequence of dtypes");
      Py_CLEAR(items);
      break;
    }
    mask |= uint64_t(1) << int(reinterpret_cast<THPDtype*>(item)->scalar_type);
  }
  if (items == nullptr) {
    return nullptr;
  }
  Py_DECREF(items);
  set_dtypes(mask);
  Py_RETURN_NONE;
}
PyObject* py_all_dtypes(PyObject*, PyObject*) {
  set_dtypes(~uint64_t(0));
  Py_RETURN_NONE;
}
PyObject* py_begin_kernel(PyObject*, PyObject* argument) {
  const char* name = PyUnicode_AsUTF8(argument);
  if (name == nullptr) {
    return nullptr;
  }
  return guarded([&] { return PyLong_FromVoidPtr(new Kernel(name, false)); });
}
PyObject* py_end_kernel(PyObject*, PyObject* argument) {
  delete static_cast<Kernel*>(PyLong_AsVoidPtr(argument));
  Py_RETURN_NONE;
}

std::array<PyMethodDef, 15> methods{{
    {"device_count", py_device_count, METH_NOARGS, nullptr},
    {"current_device", py_current_device, METH_NOARGS, nullptr},
    {"exchange_device", py_exchange_device, METH_O, nullptr},
    {"protected", py_protected, METH_NOARGS, nullptr},
    {"total_memory", py_total_memory, METH_NOARGS, nullptr},
    {"default_generator", py_default_generator, METH_O, nullptr},
    {"counters", py_counters, METH_NOARGS, nullptr},
    {"reset_counters", py_reset_counters, METH_NOARGS, nullptr},
    {"reset_fallbacks", py_reset_fallbacks, METH_NOARGS, nullptr},
    {"inject_fault", py_inject_fault, METH_VARARGS, nullptr},
    {"set_dtypes", py_set_dtypes, METH_O, nullptr},
    {"all_dtypes", py_all_dtypes, METH_NOARGS, nullptr},
    {"begin_kernel", py_begin_kernel, METH_O, nullptr},
    {"end_kernel", py_end_kernel, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
}};

PyModuleDef definition{PyModuleDef_HEAD_INIT, "omnicomp_sim", nullptr, -1, methods.data()};

PyObject* make_module() {
  return guarded([] {
    settings(); // a bad environment is told now
    set_first_use(&on_first_use);
    return PyModule_Create(&definition);
  });
}

} // namespace
} // namespace sim

#define SIM_JOIN(a, b) a##b
#define SIM_INIT(name) SIM_JOIN(PyInit_, name)
PyMODINIT_FUNC SIM_INIT(TORCH_EXTENSION_NAME)() {
  return sim::make_module();
}

// For generated code that is linked rather than called from Python: one launch, as a pair of calls around it.
extern "C" __attribute__((visibility("default"))) void* omnicomp_sim_begin_kernel(const char* name) {
  return new sim::Kernel(name, false);
}
extern "C" __attribute__((visibility("default"))) void omnicomp_sim_end_kernel(void* kernel) {
  delete static_cast<sim::Kernel*>(kernel);
}
