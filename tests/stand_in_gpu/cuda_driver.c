// What torch asks of CUDA's driver before it makes a context. See README.md.

int cuCtxGetCurrent(void** context) {
  *context = (void*)8;
  return 0;
}
int cuCtxSetCurrent(void* context) {
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = (void*)8;
  return 0;
}
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}
int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
int cuGetErrorString(int error, const char** text) {
  *text = "an error of the stand-in";
  return 0;
}
