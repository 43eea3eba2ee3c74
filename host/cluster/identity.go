package cluster

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/mlxcel/mlxcel/host/modelrepo"
	"github.com/mlxcel/mlxcel/sdk/config"
)

// Identity is what must be the same on all nodes that serve a model: which model it is, and which program serves it.
type Identity struct {
	Version    string       // of the program
	ConfigHash string       // SHA-256 of config.json's bytes, in hexadecimal
	Layers     int          // that the model's family counts
	Weights    []WeightFile // by name
}

// WeightFile is one file of weights.
type WeightFile struct {
	Name string // relative to the model folder
	Size int64  // bytes
	Hash string // SHA-256 of the contents in hexadecimal; empty where nobody asked for it
}

// Identify returns the identity of a model whose weights are whole. layers is the family's count, from the profile.
func Identify(m *modelrepo.Model, layers int, version string) (Identity, error) {
	if err := m.RequireWeights(); err != nil {
		return Identity{}, err
	}
	raw, err := os.ReadFile(filepath.Join(m.Dir, config.FileName))
	if err != nil {
		return Identity{}, err
	}
	sum := sha256.Sum256(raw)
	id := Identity{Version: version, ConfigHash: hex.EncodeToString(sum[:]), Layers: layers}
	for _, f := range m.Weights.Files {
		id.Weights = append(id.Weights, WeightFile{Name: filepath.Base(f.Path), Size: f.Size})
	}
	slices.SortFunc(id.Weights, func(a, b WeightFile) int { return strings.Compare(a.Name, b.Name) })
	return id, nil
}

// WithHashes returns the identity with the hashes of the weights' contents, which it reads from dir (--verify).
func (id Identity) WithHashes(ctx context.Context, dir string) (Identity, error) {
	id.Weights = slices.Clone(id.Weights)
	for i, w := range id.Weights {
		hash, err := hashFile(ctx, filepath.Join(dir, w.Name))
		if err != nil {
			return Identity{}, err
		}
		id.Weights[i].Hash = hash
	}
	return id, nil
}

func hashFile(ctx context.Context, path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	buf := make([]byte, 1<<20)
	for {
		if err := ctx.Err(); err != nil {
			return "", fmt.Errorf("hash %s: %w", path, err)
		}
		n, err := f.Read(buf)
		h.Write(buf[:n])
		if err == io.EOF {
			return hex.EncodeToString(h.Sum(nil)), nil
		}
		if err != nil {
			return "", err
		}
	}
}

// Difference is one thing in which two identities differ.
type Difference struct {
	What string // e.g. "program version" or "size of model.safetensors in bytes"
	Want string // the coordinator's
	Got  string // the peer's
}

func (d Difference) String() string { return fmt.Sprintf("%s: want %s, got %s", d.What, d.Want, d.Got) }

// Diff returns everything in which got, a peer's identity, differs from id. Contents are compared where both sides have
// hashed them.
func (id Identity) Diff(got Identity) []Difference {
	var out []Difference
	compare := func(what, want, got string) {
		if want != got {
			out = append(out, Difference{what, want, got})
		}
	}
	compare("program version", quote(id.Version), quote(got.Version))
	compare("SHA-256 of config.json", short(id.ConfigHash), short(got.ConfigHash))
	if id.ConfigHash != got.ConfigHash && short(id.ConfigHash) == short(got.ConfigHash) {
		compare("SHA-256 of config.json", id.ConfigHash, got.ConfigHash)
	}
	compare("layers", fmt.Sprint(id.Layers), fmt.Sprint(got.Layers))
	return append(out, diffWeights(id.Weights, got.Weights)...)
}

func diffWeights(want, got []WeightFile) (out []Difference) {
	theirs := map[string]WeightFile{}
	for _, w := range got {
		theirs[w.Name] = w
	}
	for _, w := range want {
		g, ok := theirs[w.Name]
		delete(theirs, w.Name)
		switch {
		case !ok:
			out = append(out, Difference{"weight file " + w.Name, fmt.Sprintf("%d bytes", w.Size), "no such file"})
		case w.Size != g.Size:
			out = append(out, Difference{"weight file " + w.Name, fmt.Sprintf("%d bytes", w.Size), fmt.Sprintf("%d bytes", g.Size)})
		case w.Hash != "" && g.Hash != "" && w.Hash != g.Hash:
			out = append(out, Difference{"SHA-256 of " + w.Name, w.Hash, g.Hash})
		}
	}
	for _, g := range got {
		if _, left := theirs[g.Name]; left {
			delete(theirs, g.Name)
			out = append(out, Difference{"weight file " + g.Name, "no such file", fmt.Sprintf("%d bytes", g.Size)})
		}
	}
	return out
}

// short is enough of a hash to tell two apart by eye.
func short(hash string) string {
	const digits = 12
	if len(hash) <= digits {
		return quote(hash)
	}
	return hash[:digits] + "…"
}
