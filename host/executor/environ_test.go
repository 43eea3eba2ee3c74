package executor

import (
	"io/fs"
	"slices"
	"syscall"
	"testing"
)

// foreign is a file of user 4242.
type foreign struct{ fs.FileInfo }

func (foreign) Sys() any { return &syscall.Stat_t{Uid: 4242} }

func TestChildEnvironment(t *testing.T) {
	host := []string{
		"PATH=/bin", "HOME=/home/u", "LANG=C", "MLX_DISABLE_COMPILE=1", "OMP_NUM_THREADS=2", "OPENBLAS_CORETYPE=Haswell",
		"CUDA_VISIBLE_DEVICES=0", "NVIDIA_VISIBLE_DEVICES=all",
		"HF_TOKEN=t", "NVIDIA_API_KEY=k", "AWS_SECRET_ACCESS_KEY=s", "MLXCEL_CLUSTER_SECRET=s", "MLXCEL_PLUGIN_DIR=/p",
		"LD_PRELOAD=/evil.so", "LD_LIBRARY_PATH=/lib", "DYLD_INSERT_LIBRARIES=/evil.dylib", "SSH_AUTH_SOCK=/s", "PLUGIN_CLIENT_CERT=c", "junk",
	}
	base := host[:8]
	if got := childEnvironment(host, nil); !slices.Equal(got, base) {
		t.Errorf("environment %q, want %q", got, base)
	}
	want := append(slices.Clone(base), "LD_LIBRARY_PATH=/lib")
	if got := childEnvironment(host, []string{"LD_LIBRARY_PATH", "ABSENT"}); !slices.Equal(got, want) {
		t.Errorf("environment %q, want %q", got, want)
	}
}
