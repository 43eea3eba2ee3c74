package safetensors

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sort"
	"strconv"
)

// IndexFile lists which shard holds which tensor. It is optional: a folder with one file needs none.
const IndexFile = "model.safetensors.index.json"

// ErrNoWeights reports a folder without any model*.safetensors file.
var ErrNoWeights = errors.New("no model*.safetensors file")

// ShardError reports a set of shards that is not complete, or that holds more than it should.
type ShardError struct {
	Dir    string
	File   string // the shard at fault, relative to Dir
	Reason string
}

func (e *ShardError) Error() string {
	return fmt.Sprintf("%s: %s", filepath.Join(e.Dir, e.File), e.Reason)
}

// Checkpoint is the set of weight files of one model folder.
type Checkpoint struct {
	Dir    string
	Files  []*File // by name
	byName map[string]*Tensor
}

// Open reads the headers of every weight file of dir, never their data, and checks the set: every shard that the
// index names is there and whole, holds the tensors that the index says, and no shard is left over.
func Open(dir string) (*Checkpoint, error) {
	paths, err := filepath.Glob(filepath.Join(globEscape(dir), "model*.safetensors"))
	if err != nil {
		return nil, err
	}
	index, err := readIndex(dir)
	if err != nil {
		return nil, err
	}
	names := make([]string, len(paths))
	for i, p := range paths {
		names[i] = filepath.Base(p)
	}
	sort.Strings(names)
	if err := checkShards(dir, names, index); err != nil {
		return nil, err
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("%s: %w", dir, ErrNoWeights)
	}
	c := &Checkpoint{Dir: dir, byName: map[string]*Tensor{}}
	for _, name := range names {
		f, err := ReadFile(filepath.Join(dir, name))
		if err != nil {
			return nil, err
		}
		c.Files = append(c.Files, f)
		for i := range f.Tensors {
			t := &f.Tensors[i]
			if other, ok := c.byName[t.Name]; ok {
				return nil, &FormatError{Path: f.Path, Tensor: t.Name, Reason: "also in " + other.Path}
			}
			c.byName[t.Name] = t
		}
	}
	for tensor, file := range index {
		t, ok := c.byName[tensor]
		if !ok || filepath.Base(t.Path) != file {
			return nil, &ShardError{Dir: dir, File: file, Reason: fmt.Sprintf("lacks tensor %s, which %s puts there", tensor, IndexFile)}
		}
	}
	return c, nil
}

// Lookup returns the tensor of that name.
func (c *Checkpoint) Lookup(name string) (Tensor, bool) {
	t, ok := c.byName[name]
	if !ok {
		return Tensor{}, false
	}
	return *t, true
}

// Names returns every tensor's name in order.
func (c *Checkpoint) Names() []string {
	names := make([]string, 0, len(c.byName))
	for n := range c.byName {
		names = append(names, n)
	}
	sort.Strings(names)
	return names
}

// Bytes returns the size of all tensors together.
func (c *Checkpoint) Bytes() int64 {
	n := int64(0)
	for _, t := range c.byName {
		n += t.Size
	}
	return n
}

// readIndex returns tensor → shard, nil where the folder has no index.
func readIndex(dir string) (map[string]string, error) {
	path := filepath.Join(dir, IndexFile)
	raw, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var index struct {
		WeightMap map[string]string `json:"weight_map"`
	}
	if err := json.Unmarshal(raw, &index); err != nil {
		return nil, &FormatError{Path: path, Reason: fmt.Sprintf("not a shard index: %v", err)}
	}
	for tensor, file := range index.WeightMap {
		if file != filepath.Base(file) || file == "." || file == "" {
			return nil, &FormatError{Path: path, Tensor: tensor, Reason: fmt.Sprintf("shard name %q is not a file name", file)}
		}
	}
	return index.WeightMap, nil
}

var shardName = regexp.MustCompile(`^model-(\d{5})-of-(\d{5})\.safetensors$`)

// checkShards compares the files found with the index or, without one, with the count in the shards' own names.
func checkShards(dir string, found []string, index map[string]string) error {
	want := map[string]bool{}
	for _, file := range index {
		want[file] = true
	}
	if index == nil {
		for _, file := range found {
			m := shardName.FindStringSubmatch(file)
			if m == nil {
				want[file] = true
				continue
			}
			total, _ := strconv.Atoi(m[2])
			for i := 1; i <= total; i++ {
				want[fmt.Sprintf("model-%05d-of-%05d.safetensors", i, total)] = true
			}
		}
	}
	wanted := make([]string, 0, len(want))
	for file := range want {
		wanted = append(wanted, file)
	}
	sort.Strings(wanted)
	for _, file := range wanted {
		if !slices.Contains(found, file) {
			return &ShardError{Dir: dir, File: file, Reason: "missing shard; fetch it, or fetch the model again"}
		}
	}
	for _, file := range found {
		if !want[file] {
			return &ShardError{Dir: dir, File: file, Reason: "extra shard that " + IndexFile + " does not name; remove it, or fetch the model again"}
		}
	}
	return nil
}

// globEscape quotes the characters of dir that filepath.Glob would expand.
func globEscape(dir string) string {
	out := make([]byte, 0, len(dir))
	for i := 0; i < len(dir); i++ {
		if c := dir[i]; c == '*' || c == '?' || c == '[' || c == '\\' {
			out = append(out, '\\')
		}
		out = append(out, dir[i])
	}
	return string(out)
}
