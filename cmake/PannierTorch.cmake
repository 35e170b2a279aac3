# Defines the target pannier_torch from an installed torch Python package. torch's own TorchConfig.cmake demands a CUDA
# toolkit when torch was built with CUDA; Pannier's CPU library needs none, so the few facts are stated here.
if(NOT PANNIER_TORCH_ROOT)
  execute_process(COMMAND python3 -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
                  OUTPUT_VARIABLE PANNIER_TORCH_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(NOT EXISTS "${PANNIER_TORCH_ROOT}/lib/libtorch_cpu.so")
  message(FATAL_ERROR "torch was not found: set PANNIER_TORCH_ROOT to the folder of the torch Python package, version 2.11 or newer")
endif()
file(GLOB PANNIER_TORCH_OPENMP "${PANNIER_TORCH_ROOT}/lib/libgomp*.so*")
if(NOT TARGET pannier_torch)
  add_library(pannier_torch INTERFACE IMPORTED)
  target_include_directories(pannier_torch SYSTEM INTERFACE
    "${PANNIER_TORCH_ROOT}/include" "${PANNIER_TORCH_ROOT}/include/torch/csrc/api/include")
  # --no-as-needed keeps libtorch.so, whose static initialisers register the CUDA backend where there is one.
  target_link_libraries(pannier_torch INTERFACE
    "-Wl,--no-as-needed" "${PANNIER_TORCH_ROOT}/lib/libtorch.so" "${PANNIER_TORCH_ROOT}/lib/libtorch_cpu.so"
    "${PANNIER_TORCH_ROOT}/lib/libc10.so" "-Wl,--as-needed")
  target_link_options(pannier_torch INTERFACE "-Wl,-rpath,${PANNIER_TORCH_ROOT}/lib" "-Wl,--disable-new-dtags"
    "-Wl,-rpath-link,${PANNIER_TORCH_ROOT}/lib")
endif()

# Compiles the torch headers that most files include once and shares them. Each that is added slows every file down: with
# ATen/ATen.h and autograd's here, a file takes two seconds more. The few files that need those read them themselves.
function(pannier_precompile_torch target)
  if(NOT TARGET pannier_torch_pch)
    file(GENERATE OUTPUT ${CMAKE_BINARY_DIR}/torch_pch.cc CONTENT "")
    add_library(pannier_torch_pch OBJECT ${CMAKE_BINARY_DIR}/torch_pch.cc)
    target_link_libraries(pannier_torch_pch PUBLIC pannier_options pannier_torch)
    set_target_properties(pannier_torch_pch PROPERTIES CXX_EXTENSIONS OFF)
    target_precompile_headers(pannier_torch_pch PRIVATE
      <ATen/core/Tensor.h> <ATen/ops/arange.h> <ATen/ops/empty.h> <ATen/ops/equal.h> <ATen/ops/from_blob.h> <ATen/ops/full.h>
      <ATen/ops/ones.h> <ATen/ops/zeros.h> <c10/core/GradMode.h>
      <string> <vector> <memory> <map> <optional> <functional>)
  endif()
  target_precompile_headers(${target} REUSE_FROM pannier_torch_pch)
endfunction()
