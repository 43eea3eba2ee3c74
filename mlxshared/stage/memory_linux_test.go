package stage

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/mlxcel/mlxcel/sdk"
)

// envLittle marks the child process of TestLittleMemory.
const envLittle = "MLXCEL_TEST_LITTLE_MEMORY"

// A process that may not have the memory of a step answers with the typed error, lives, and serves what fits; 200 times in a row
// without growing.
func TestLittleMemory(t *testing.T) {
	if os.Getenv(envLittle) != "" {
		littleMemory(t)
		return
	}
	child := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestLittleMemory$", "-test.v")
	child.Env = append(os.Environ(), envLittle+"=1")
	out, err := child.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if !bytes.Contains(out, []byte("200 steps refused")) {
		t.Errorf("the child did nothing:\n%s", out)
	}
}

func littleMemory(t *testing.T) {
	const rows = 1 << 20 // of 128 bytes: each layer's activations are beyond the limit
	k := wholeKept(t, "full", "conv")
	large := &sdk.Step{Seqs: []sdk.SeqStep{{Seq: 2, Rows: rows, Tokens: make([]int32, rows), Prompt: true}}}
	k.mustReserve(sdk.Reservation{Seq: 1})
	k.mustReserve(sdk.Reservation{Seq: 2})
	k.feed(1, 0, 5)
	limit := syscall.Rlimit{Cur: virtualBytes(t) + 96<<20, Max: virtualBytes(t) + 96<<20}
	if err := syscall.Setrlimit(syscall.RLIMIT_AS, &limit); err != nil {
		t.Fatal(err)
	}
	refused, resident := 0, int64(0)
	for i := range 200 {
		_, err := k.Step(t.Context(), large)
		if full, ok := errors.AsType[*sdk.Error](err); ok && full.Code == sdk.CodeOutOfMemory && (full.Wanted <= 0 || full.Held <= 0) {
			t.Fatalf("%v wants %d bytes beside %d held", err, full.Wanted, full.Held)
		}
		if sdk.CodeOf(err) != sdk.CodeOutOfMemory || !strings.Contains(err.Error(), "no memory for ") {
			t.Fatalf("round %d: %v", i, err)
		}
		refused++
		k.feed(1, 5+i, 1)
		if i == 20 {
			resident = sdk.ResidentBytes()
		}
	}
	if now := sdk.ResidentBytes(); now > resident+4<<20 {
		t.Errorf("%d resident bytes became %d", resident, now)
	}
	t.Logf("%d steps refused", refused)
}

// virtualBytes is the process's address space.
func virtualBytes(t *testing.T) uint64 {
	raw, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Fatal(err)
	}
	pages, err := strconv.ParseUint(strings.Fields(string(raw))[0], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return pages * uint64(os.Getpagesize())
}
