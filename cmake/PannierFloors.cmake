# Describes the house: one static library a folder, each with its explicit dependencies, folded into libpannier.so.

# pannier_options carries the language level, the warnings and the floating-point contract that every target shares.
add_library(pannier_options INTERFACE)
target_compile_features(pannier_options INTERFACE cxx_std_20)
target_compile_options(pannier_options INTERFACE
  -fPIC -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Winvalid-pch -ffp-contract=off
  $<$<BOOL:${PANNIER_WERROR}>:-Werror>)
target_include_directories(pannier_options INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src>)
if(PANNIER_SANITIZE)
  target_compile_options(pannier_options INTERFACE -fsanitize=${PANNIER_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(pannier_options INTERFACE -fsanitize=${PANNIER_SANITIZE})
endif()

# pannier_floor(NAME [TORCH] [FOLDER folder] SOURCES ... [DEPENDS floors...] [LINK libraries...]) adds the library
# pannier_NAME from sources in the folder of that name, or in FOLDER where one folder has parts with other dependencies.
function(pannier_floor name)
  cmake_parse_arguments(ARG "TORCH" "FOLDER" "SOURCES;DEPENDS;LINK" ${ARGN})
  if(ARG_TORCH AND NOT PANNIER_TORCH)
    return()
  endif()
  if(NOT ARG_FOLDER)
    set(ARG_FOLDER ${name})
  endif()
  list(TRANSFORM ARG_SOURCES PREPEND "${ARG_FOLDER}/")
  list(TRANSFORM ARG_DEPENDS PREPEND "pannier_")
  add_library(pannier_${name} STATIC ${ARG_SOURCES})
  set_target_properties(pannier_${name} PROPERTIES CXX_EXTENSIONS OFF)
  target_link_libraries(pannier_${name} PUBLIC pannier_options ${ARG_DEPENDS} ${ARG_LINK})
  if(ARG_TORCH)
    target_link_libraries(pannier_${name} PUBLIC pannier_torch)
    pannier_precompile_torch(pannier_${name})
  endif()
  set_property(GLOBAL APPEND PROPERTY PANNIER_FLOORS pannier_${name})
endfunction()

# pannier_test(NAME [TORCH] SOURCES ... DEPENDS folders...) adds a GoogleTest program and registers its cases.
function(pannier_test name)
  cmake_parse_arguments(ARG "TORCH" "" "SOURCES;DEPENDS" ${ARGN})
  if(ARG_TORCH AND NOT PANNIER_TORCH)
    return()
  endif()
  add_executable(${name}_test ${ARG_SOURCES})
  set_target_properties(${name}_test PROPERTIES CXX_EXTENSIONS OFF)
  target_include_directories(${name}_test PRIVATE ${PROJECT_SOURCE_DIR})
  if(ARG_TORCH)
    target_link_libraries(${name}_test PRIVATE pannier pannier_options pannier_torch fmt::fmt GTest::gmock_main)
    pannier_precompile_torch(${name}_test)
  else()
    list(TRANSFORM ARG_DEPENDS PREPEND "pannier_")
    target_link_libraries(${name}_test PRIVATE pannier_options ${ARG_DEPENDS} GTest::gmock_main)
  endif()
  gtest_discover_tests(${name}_test DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 600)
endfunction()
