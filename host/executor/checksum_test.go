package executor

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const (
	sumA = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
	sumB = "BBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBB"
)

func TestParseChecksum(t *testing.T) {
	for _, c := range []struct {
		name, text, want, err string
	}{
		{"bare", sumA, sumA, ""},
		{"bare with newline", sumA + "\n", sumA, ""},
		{"upper case", sumB + "\n", strings.ToLower(sumB), ""},
		{"windows newline", sumA + "\r\n", sumA, ""},
		{"sha256sum text", sumA + "  llama\n", sumA, ""},
		{"sha256sum binary", sumA + " *llama\n", sumA, ""},
		{"with folder", sumA + "  bin/plugins/llama\n", sumA, ""},
		{"of several", sumA + "  gemma\n" + sumB + "  llama\n", strings.ToLower(sumB), ""},
		{"comment and blank", "# release 1\n\n" + sumA + "  llama\n", sumA, ""},
		{"other name", sumA + "  gemma\n", "", "no line for llama, only for gemma"},
		{"empty", "\n", "", "it is empty"},
		{"short", sumA[:63], "", "64 hex digits"},
		{"long", sumA + "a", "", "64 hex digits"},
		{"no hex", strings.Repeat("x", 64), "", "64 hex digits"},
		{"BSD style", "SHA256 (llama) = " + sumA, "", "64 hex digits"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := parseChecksum(c.text, "llama")
			if got != c.want {
				t.Errorf("sum %q, want %q", got, c.want)
			}
			checkText(t, err, c.err)
		})
	}
}

func FuzzParseChecksum(f *testing.F) {
	f.Add(sumA + "  llama\n")
	f.Add(sumA)
	f.Add("# c\n" + sumB + " *x\n")
	f.Fuzz(func(t *testing.T, text string) {
		sum, err := parseChecksum(text, "llama")
		if err != nil {
			return
		}
		raw, hexErr := hex.DecodeString(sum)
		if hexErr != nil || len(raw) != sha256.Size || strings.ToLower(sum) != sum {
			t.Errorf("accepted %q as %q", text, sum)
		}
	})
}

func TestCheckChecksum(t *testing.T) {
	content := []byte("program")
	digest := sha256.Sum256(content)
	good := hex.EncodeToString(digest[:])
	for _, c := range []struct {
		name    string
		file    string // content of the checksum file, none when empty
		require bool
		want    ChecksumState
		err     string
	}{
		{"none", "", false, ChecksumNone, ""},
		{"missing", "", true, ChecksumMissing, "--plugin-require-checksum"},
		{"ok", good, false, ChecksumOK, ""},
		{"ok and required", good + "  tool\n", true, ChecksumOK, ""},
		{"mismatch", sumA, false, ChecksumMismatch, "wrong checksum"},
		{"unreadable", "what", false, ChecksumMismatch, "64 hex digits"},
		{"huge", strings.Repeat("#\n", maxChecksum), false, ChecksumMismatch, "more than 65536 bytes"},
	} {
		t.Run(c.name, func(t *testing.T) {
			binary := filepath.Join(t.TempDir(), "tool")
			writeFile(t, binary, string(content), 0o755)
			if c.file != "" {
				writeFile(t, binary+".sha256", c.file, 0o644)
			}
			state, err := checkChecksum(binary, c.require)
			if state != c.want {
				t.Errorf("state %v, want %v", state, c.want)
			}
			checkText(t, err, c.err)
			if sum, ok := errors.AsType[*ChecksumError](err); ok && sum.State != c.want {
				t.Errorf("the error's state is %v, want %v", sum.State, c.want)
			}
		})
	}
}

func writeFile(t *testing.T, path, content string, mode os.FileMode) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), mode); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil { // past the umask
		t.Fatal(err)
	}
}

// checkText compares an error's text with a part that it must hold; an empty part wants no error.
func checkText(t *testing.T, err error, part string) {
	t.Helper()
	switch {
	case part == "" && err != nil:
		t.Errorf("error %v, want none", err)
	case part != "" && err == nil:
		t.Errorf("no error, want one with %q", part)
	case part != "" && !strings.Contains(err.Error(), part):
		t.Errorf("error %q, want %q in it", err, part)
	}
}
