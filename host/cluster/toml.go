package cluster

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/pelletier/go-toml/v2"
)

// maxFile bounds a cluster file in bytes.
const maxFile = 1 << 20

// Load reads, checks and accepts a cluster file: every fault and every role that is not built yet is reported at once.
func Load(path string) (*Config, error) {
	st, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", FlagConfig, err)
	}
	if st.Size() > maxFile {
		return nil, &Fault{File: path, Reason: fmt.Sprintf("has %d bytes, want at most %d: it is no cluster TOML", st.Size(), maxFile)}
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", FlagConfig, err)
	}
	c, err := Parse(raw, path)
	if c == nil {
		return nil, err
	}
	if unbuilt := c.Supported(); unbuilt != nil {
		var errs []error
		if err != nil {
			errs = append(errs, err)
		}
		err = joinLines(append(errs, unbuilt))
	}
	if err != nil {
		return nil, err
	}
	return c, nil
}

// Parse reads a cluster file and validates it. The error is a *ConfigError with every fault: keys that are not known, values of
// the wrong kind, and what Validate finds. Beside such an error the topology is returned as far as it could be read, so
// that a caller can add what it finds; it is nil only where the text is not TOML, which is a *Fault. path is for messages.
func Parse(raw []byte, path string) (*Config, error) {
	var document map[string]any
	if len(raw) > maxFile {
		return nil, &Fault{File: path, Reason: fmt.Sprintf("has %d bytes, want at most %d: it is no cluster TOML", len(raw), maxFile)}
	}
	if err := toml.NewDecoder(bytes.NewReader(raw)).Decode(&document); err != nil {
		return nil, syntaxFault(path, err)
	}
	c := &Config{Path: path}
	r := &reader{}
	root := r.table("", document)
	readCluster(root.child("cluster"), c)
	for i, entry := range root.tables("nodes") {
		if i == MaxNodes {
			r.add("nodes", fmt.Sprintf("has more than %d entries", MaxNodes))
			break
		}
		c.Nodes = append(c.Nodes, readNode(entry))
	}
	root.done()
	c.check(&r.faults)
	return c, r.faults.err(path)
}

func syntaxFault(path string, err error) error {
	fault := &Fault{File: path, Reason: strings.TrimPrefix(err.Error(), "toml: ")}
	if d, ok := errors.AsType[*toml.DecodeError](err); ok {
		row, column := d.Position()
		fault.Key, fault.Reason = strings.Join(d.Key(), "."), fmt.Sprintf("(line %d, column %d): %s", row, column, fault.Reason)
	}
	return fault
}

func readCluster(t *table, c *Config) {
	c.Name = t.text("name")
	c.PipelineParallel = t.integer("pipeline_parallel_size", 1)
	c.TensorParallel = t.integer("tensor_parallel_size", 1)
	c.Backend = parsed(t, "transport_backend", ParseBackend)
	c.SecretFile = t.text("secret_file")
	c.MemoryBytes = t.memory()
	t.done()
}

func readNode(t *table) Node {
	n := Node{
		ID:          t.text("id"),
		Address:     t.text("address"),
		Role:        parsed(t, "role", ParseRole),
		Stage:       t.integer("stage", Unset),
		Rank:        t.integer("rank", Unset),
		MemoryBytes: t.memory(),
	}
	for key, v := range map[string]int{"stage": n.Stage, "rank": n.Rank} {
		if _, given := t.values[key]; given && v < 0 {
			t.fault(key, fmt.Sprintf("is %d, want a number from 0", v))
		}
	}
	t.done()
	return n
}

// memory reads resources.memory_bytes, 0 where it is not given.
func (t *table) memory() int64 {
	resources := t.child("resources")
	defer resources.done()
	const key = "memory_bytes"
	v, given := resources.value(key)
	n, ok := v.(int64)
	if given && (!ok || n <= 0) {
		resources.fault(key, fmt.Sprintf("is %s, want a number of bytes above 0, e.g. 17179869184 for 16 GiB", show(v)))
		return 0
	}
	return n
}

// reader collects the faults of a document.
type reader struct{ faults }

// table is one table of a document, whose keys are taken one by one.
type table struct {
	*reader
	path   string // with a dot at its end, empty for the document
	values map[string]any
	taken  []string
}

func (r *reader) table(path string, values map[string]any) *table {
	return &table{reader: r, path: path, values: values}
}

func (t *table) fault(key, reason string) { t.add(t.path+key, reason) }

func (t *table) value(key string) (any, bool) {
	t.taken = append(t.taken, key)
	v, ok := t.values[key]
	return v, ok
}

// child returns the table of that key, an empty one where it is not given.
func (t *table) child(key string) *table {
	v, given := t.value(key)
	values, ok := v.(map[string]any)
	if given && !ok {
		t.fault(key, fmt.Sprintf("is %s, want a table", show(v)))
	}
	return t.reader.table(t.path+key+".", values)
}

// tables returns the tables of an array.
func (t *table) tables(key string) []*table {
	v, given := t.value(key)
	list, ok := v.([]any)
	if given && !ok {
		t.fault(key, fmt.Sprintf("is %s, want one [[%s]] table for each", show(v), key))
	}
	var out []*table
	for i, v := range list {
		path := fmt.Sprintf("%s%s[%d]", t.path, key, i)
		values, ok := v.(map[string]any)
		if !ok {
			t.add(path, fmt.Sprintf("is %s, want a table", show(v)))
		}
		out = append(out, t.reader.table(path+".", values))
	}
	return out
}

func (t *table) text(key string) string {
	v, given := t.value(key)
	s, ok := v.(string)
	if given && !ok {
		t.fault(key, fmt.Sprintf("is %s, want a text in quotes", show(v)))
	}
	return s
}

func (t *table) integer(key string, absent int) int {
	v, given := t.value(key)
	if !given {
		return absent
	}
	n, ok := v.(int64)
	if !ok || n > math.MaxInt32 || n < math.MinInt32 {
		t.fault(key, fmt.Sprintf("is %s, want a whole number", show(v)))
		return absent
	}
	return int(n)
}

// parsed reads a text that parse takes, and the empty text where the key is not given.
func parsed[T ~string](t *table, key string, parse func(string) (T, error)) T {
	v, given := t.value(key)
	s, ok := v.(string)
	if given && !ok {
		t.fault(key, fmt.Sprintf("is %s, want a text in quotes", show(v)))
		return ""
	}
	if !given {
		return ""
	}
	value, err := parse(s)
	if err != nil {
		t.fault(key, err.Error())
	}
	return value
}

// done reports the keys that nobody asked for.
func (t *table) done() {
	slices.Sort(t.taken)
	for _, key := range slices.Sorted(maps.Keys(t.values)) {
		if !slices.Contains(t.taken, key) {
			t.fault(key, fmt.Sprintf("is not a known key: correct or remove it; known here: %s", strings.Join(t.taken, ", ")))
		}
	}
}

// show writes a value for a message.
func show(v any) string {
	switch v := v.(type) {
	case string:
		return quote(v)
	case map[string]any:
		return "a table"
	case []any:
		return "an array"
	}
	return fmt.Sprint(v)
}

const header = `# An mlxcel cluster. Written by mlxcel from its flags: the same peers give the same bytes.
# Start a node of it with --distributed-config FILE --node-id ID.
`

// Render writes the topology as TOML: the same topology gives the same bytes. The coordinator comes before the stages, which are in
// order; keys that hold their default are left out, but for transport_backend.
func (c *Config) Render() []byte {
	var b bytes.Buffer
	line := func(key, value string) { fmt.Fprintf(&b, "%s = %s\n", key, value) }
	number := func(key string, n int64) { line(key, strconv.FormatInt(n, 10)) }
	b.WriteString(header)
	b.WriteString("\n[cluster]\n")
	line("name", quote(c.Name))
	number("pipeline_parallel_size", int64(c.PipelineParallel))
	if c.TensorParallel > 1 {
		number("tensor_parallel_size", int64(c.TensorParallel))
	}
	line("transport_backend", quote(string(c.backend())))
	if c.SecretFile != "" {
		line("secret_file", quote(c.SecretFile))
	}
	if c.MemoryBytes != 0 {
		number("resources.memory_bytes", c.MemoryBytes)
	}
	for _, n := range c.ordered() {
		b.WriteString("\n[[nodes]]\n")
		line("id", quote(n.ID))
		line("address", quote(n.Address))
		line("role", quote(string(n.Role)))
		if n.Stage != Unset {
			number("stage", int64(n.Stage))
		}
		if n.Rank != Unset {
			number("rank", int64(n.Rank))
		}
		if n.MemoryBytes != 0 {
			number("resources.memory_bytes", n.MemoryBytes)
		}
	}
	return b.Bytes()
}

func (c *Config) backend() Backend {
	if c.Backend == "" {
		return BackendTCP
	}
	return c.Backend
}

// ordered returns the nodes as they are written: the coordinator, then by stage and rank; what is equal stays as it is.
func (c *Config) ordered() []Node {
	nodes := slices.Clone(c.Nodes)
	slices.SortStableFunc(nodes, func(a, b Node) int {
		if (a.Role == RoleHybrid) != (b.Role == RoleHybrid) {
			if a.Role == RoleHybrid {
				return -1
			}
			return 1
		}
		if a.Stage != b.Stage {
			return a.Stage - b.Stage
		}
		return a.Rank - b.Rank
	})
	return nodes
}

// quote writes a TOML basic string.
func quote(s string) string {
	var b strings.Builder
	b.WriteByte('"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			b.WriteByte('\\')
			b.WriteRune(r)
		case unicode.IsPrint(r):
			b.WriteRune(r)
		default:
			fmt.Fprintf(&b, `\U%08X`, r)
		}
	}
	b.WriteByte('"')
	return b.String()
}
