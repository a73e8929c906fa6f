# Horovod's core and the shim in one library; put beside horovod_shim.cc into a folder of Horovod's sources.
add_library(horovod_shim SHARED ${SOURCES} horovod_shim.cc)
target_include_directories(horovod_shim PRIVATE "${EIGEN_INCLUDE_PATH}" "${FLATBUFFERS_INCLUDE_PATH}")
target_link_libraries(horovod_shim ${LINKER_LIBS} gloo)
set_target_properties(horovod_shim PROPERTIES PREFIX "" LIBRARY_OUTPUT_DIRECTORY "${SHIM_FOLDER}")
