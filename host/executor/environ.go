package executor

import (
	"slices"
	"strings"
)

// An executor sees these variables of the host's environment and no others: no token, no key, no cluster
// secret. What else a machine needs is named by Config.PassEnv.
var (
	passedNames = []string{
		"PATH",           // MLX's CPU compiler looks for c++
		"HOME",           // driver and shader caches
		"LANG", "LC_ALL", // texts of system errors
		"TZ",         // times in logs
		"GOMAXPROCS", // the thread limits of the libraries below
		"VECLIB_MAXIMUM_THREADS",
		"NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", // not the prefix: NVIDIA_API_KEY is a token
	}
	passedPrefixes = []string{"MLX_", "OMP_", "OPENBLAS_", "MKL_", "KMP_", "GOMP_", "CUDA_", "MTL_"}
)

// childEnvironment picks from the host's environment what an executor may see.
func childEnvironment(host, pass []string) []string {
	var out []string
	for _, kv := range host {
		name, _, ok := strings.Cut(kv, "=")
		if ok && (slices.Contains(passedNames, name) || hasAnyPrefix(name, passedPrefixes) || slices.Contains(pass, name)) {
			out = append(out, kv)
		}
	}
	return out
}

func hasAnyPrefix(s string, prefixes []string) bool {
	return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(s, p) })
}

// environment turns os.Environ's form into a map; of a name given twice the last counts.
func environment(environ []string) map[string]string {
	out := make(map[string]string, len(environ))
	for _, kv := range environ {
		if name, value, ok := strings.Cut(kv, "="); ok {
			out[name] = value
		}
	}
	return out
}
