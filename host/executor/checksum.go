package executor

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// ChecksumState is what is known of a binary's SHA-256.
type ChecksumState int

const (
	ChecksumNone     ChecksumState = iota // no .sha256 beside the binary, and none asked for
	ChecksumOK                            // the file beside it agrees
	ChecksumMismatch                      // the file beside it disagrees, or can't be read
	ChecksumMissing                       // none there, though compulsory
)

func (s ChecksumState) String() string {
	switch s {
	case ChecksumNone:
		return "none"
	case ChecksumOK:
		return "ok"
	case ChecksumMismatch:
		return "mismatch"
	case ChecksumMissing:
		return "missing"
	}
	return fmt.Sprintf("checksum(%d)", int(s))
}

const (
	checksumSuffix = ".sha256"
	maxChecksum    = 64 << 10 // bytes of a checksum file
)

// checkChecksum compares the binary with the .sha256 file beside it.
func checkChecksum(binary string, require bool) (ChecksumState, error) {
	file := binary + checksumSuffix
	want, err := readChecksum(file, filepath.Base(binary))
	switch {
	case errors.Is(err, fs.ErrNotExist) && !require:
		return ChecksumNone, nil
	case errors.Is(err, fs.ErrNotExist):
		return ChecksumMissing, &ChecksumError{Path: binary, File: file, State: ChecksumMissing}
	case err != nil:
		return ChecksumMismatch, fmt.Errorf("checksum of %s: %w", binary, err)
	}
	if err := verifyChecksum(binary, want); err != nil {
		return ChecksumMismatch, err
	}
	return ChecksumOK, nil
}

// verifyChecksum hashes the binary and compares it with want, in lower-case hex.
func verifyChecksum(binary, want string) error {
	f, err := os.Open(binary)
	if err != nil {
		return fmt.Errorf("checksum of %s: %w", binary, err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return fmt.Errorf("checksum of %s: %w", binary, err)
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != want {
		return &ChecksumError{Path: binary, File: binary + checksumSuffix, State: ChecksumMismatch, Want: want, Got: got}
	}
	return nil
}

func readChecksum(file, binary string) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxChecksum+1))
	if err != nil {
		return "", err
	}
	if len(text) > maxChecksum {
		return "", fmt.Errorf("%s has more than %d bytes: want one SHA-256 in hex or sha256sum's output", file, maxChecksum)
	}
	sum, err := parseChecksum(string(text), binary)
	if err != nil {
		return "", fmt.Errorf("%s: %w", file, err)
	}
	return sum, nil
}

// parseChecksum reads a digest from a bare hex line, or from sha256sum's output: lines of
// "<hex>  <name>" or "<hex> *<name>". Of several lines the one that names binary counts.
func parseChecksum(text, binary string) (string, error) {
	var names []string
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		sum, name, _ := strings.Cut(line, " ")
		if raw, err := hex.DecodeString(sum); err != nil || len(raw) != sha256.Size {
			return "", fmt.Errorf("line %q is no SHA-256: want 64 hex digits, alone or followed by a file name", clip(line))
		}
		name = filepath.Base(strings.TrimPrefix(strings.TrimSpace(name), "*"))
		if name == "." || name == binary {
			return strings.ToLower(sum), nil
		}
		names = append(names, name)
	}
	if len(names) > 0 {
		return "", fmt.Errorf("no line for %s, only for %s", binary, clip(strings.Join(names, ", ")))
	}
	return "", errors.New("it is empty: want one SHA-256 in hex or sha256sum's output")
}
