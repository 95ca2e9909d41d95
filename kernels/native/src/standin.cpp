#include <cstring>
#include "lamina/linear.h"
namespace lamina {
bool linear_supports(Isa, int32_t t){return t==0;}
size_t packed_bytes(Isa,int32_t,int64_t r,int64_t c){return r*c*4;}
void pack_rows(Isa,const uint8_t*s,int64_t rb,int64_t b,int64_t e,const PackedPart&t){for(int64_t r=b;r<e;++r)memcpy(t.data+r*t.cols*4,s+r*rb,t.cols*4);}
size_t linear_scratch_bytes(Isa,int32_t,int32_t,int32_t){return 64;}
static float dot(const float*a,const float*b,int n){float s=0;for(int i=0;i<n;++i)s+=a[i]*b[i];return s;}
void linear(Isa,const LinearArgs&a,const Region&g){
 int base=0; bool gated=(int)a.mode>=2;
 for(int p=0;p<a.num_parts;++p){const auto&w=a.parts[p];if(gated&&p)break;
  for(int r=0;r<a.num_rows;++r)for(int o=g.thread;o<w.rows;o+=g.num_threads){
   float v=dot(a.x+r*a.ldx,(float*)w.data+(int64_t)o*w.cols,w.cols)+(a.bias?a.bias[base+o]:0);
   float*out=a.out+r*a.ldo+base+o;
   if(gated){float u=dot(a.x+r*a.ldx,(float*)a.parts[1].data+(int64_t)o*w.cols,w.cols)+(a.bias?a.bias[w.rows+o]:0);
     float act=a.mode==LinearMode::kGateSilu?v/(1+__builtin_expf(-v)):0.5f*v*(1+__builtin_tanhf(0.7978845608f*(v+0.044715f*v*v*v)));*out=act*u;}
   else *out=(a.mode==LinearMode::kAccumulate?*out:0)+v;}
  base+=w.rows;}}
void unpack_row(Isa,const PackedPart&p,int64_t r,float s,float*o){for(int i=0;i<p.cols;++i)o[i]=s*((float*)p.data)[r*p.cols+i];}
}
