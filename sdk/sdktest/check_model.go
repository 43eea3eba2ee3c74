package sdktest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/mlxcel/mlxcel/sdk"
	"github.com/mlxcel/mlxcel/sdk/safetensors"
)

// Checks of what comes before the first step: description, profile and load.

func checkDescribe(ctx context.Context, r *rig) error {
	client, err := r.start()
	if err != nil {
		return err
	}
	d, err := client.Describe(ctx)
	if err != nil {
		return err
	}
	if d.ContractVersion != sdk.ContractVersion {
		return fmt.Errorf("contract version %d, want %d", d.ContractVersion, sdk.ContractVersion)
	}
	if d.Name == "" || d.Version == "" || d.Runtime == "" {
		return fmt.Errorf("name %q, version %q and runtime %q must not be empty", d.Name, d.Version, d.Runtime)
	}
	if err := checkDevices(d.Devices); err != nil {
		return err
	}
	seen := map[string]bool{}
	for _, f := range d.Families {
		if f.Name == "" || seen[f.Name] {
			return fmt.Errorf("family name %q is empty or listed twice", f.Name)
		}
		seen[f.Name] = true
		if err := checkFamily(f); err != nil {
			return fmt.Errorf("family %s: %w", f.Name, err)
		}
	}
	return nil
}

func checkDevices(devices []sdk.Device) error {
	if len(devices) == 0 {
		return errors.New("it names no device that it could load on")
	}
	seen := map[int]bool{}
	for _, d := range devices {
		if !slices.Contains([]string{"cpu", "metal", "cuda"}, d.Kind) {
			return fmt.Errorf("device kind %q, want cpu, metal or cuda", d.Kind)
		}
		if d.TotalMemory <= 0 || d.FreeMemory > d.TotalMemory {
			return fmt.Errorf("device %d has %d bytes free of %d: plans are made from them", d.Index, d.FreeMemory, d.TotalMemory)
		}
		if seen[d.Index] {
			return fmt.Errorf("two devices have the index %d, by which a load names one", d.Index)
		}
		seen[d.Index] = true
	}
	return nil
}

func checkFamily(f sdk.Family) error {
	if len(f.ModelTypes) == 0 {
		return errors.New("it accepts no model_type")
	}
	if len(f.Quantizations) == 0 && !f.PlanOnly {
		return errors.New(`it runs no quantization: list "none" for plain weights`)
	}
	for _, i := range f.Imports {
		if format, architecture, ok := strings.Cut(i, ":"); !ok || format == "" || architecture == "" {
			return fmt.Errorf("import %q, want <format>:<architecture>", i)
		}
	}
	return nil
}

func checkInspect(ctx context.Context, r *rig) error {
	p := r.profile
	if p.Family != r.cfg.Family {
		return fmt.Errorf("the profile names the family %q, want %q", p.Family, r.cfg.Family)
	}
	if !slices.Contains(r.family.ModelTypes, p.ModelType) {
		return fmt.Errorf("the profile's model_type %q is not among the described %v", p.ModelType, r.family.ModelTypes)
	}
	if p.Boundary.Width < 1 || p.Boundary.Dtype.Size() == 0 {
		return fmt.Errorf("boundary %+v has no size", p.Boundary)
	}
	if p.HiddenSize < 1 || p.Quantization == "" {
		return fmt.Errorf("hidden size %d and quantization %q must be set", p.HiddenSize, p.Quantization)
	}
	if !p.Exact {
		return errors.New("the profile is estimated, though the weights are there")
	}
	if p.Tied != (p.TiedBytes > 0) || p.TiedBytes > min(p.Embedding, p.Head) {
		return fmt.Errorf("tied is %v with %d bytes in common of an embedding of %d and a head of %d", p.Tied, p.TiedBytes, p.Embedding, p.Head)
	}
	for i, l := range p.Layers {
		if l.Kind == "" || l.Weights < 1 {
			return fmt.Errorf("layer %d has the kind %q and %d bytes of weights", i, l.Kind, l.Weights)
		}
	}
	return r.inspectWithoutWeights(ctx)
}

// inspectWithoutWeights compares the profile from config.json alone with the exact one.
func (r *rig) inspectWithoutWeights(ctx context.Context) error {
	dir, err := r.copyModel()
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	client, err := r.start()
	if err != nil {
		return err
	}
	p, err := client.Inspect(ctx, sdk.InspectRequest{Dir: dir, Dtype: r.dtype})
	if err != nil {
		return fmt.Errorf("inspect without weights: %w", err)
	}
	if p.Exact {
		return errors.New("inspect without weights: the profile can't be exact")
	}
	if len(p.Layers) != len(r.profile.Layers) || p.HiddenSize != r.profile.HiddenSize {
		return fmt.Errorf("inspect without weights: %d layers of width %d became %d of %d", len(r.profile.Layers), r.profile.HiddenSize, len(p.Layers), p.HiddenSize)
	}
	return nil
}

// checkWeights compares the bytes that a load reports with the profile, whole and for each end.
func checkWeights(ctx context.Context, r *rig) error {
	for _, layers := range r.ranges() {
		s, err := r.load(ctx, r.request(layers))
		if err != nil {
			return err
		}
		if want := r.weightBytes(layers); s.report.WeightBytes != want {
			return fmt.Errorf("layers [%d, %d): the load holds %d bytes, the profile says %d", layers.Start, layers.End, s.report.WeightBytes, want)
		}
		if s.report.Boundary != r.profile.Boundary {
			return fmt.Errorf("the load's boundary %+v, the profile's %+v", s.report.Boundary, r.profile.Boundary)
		}
		if err := r.stop(); err != nil {
			return err
		}
	}
	return nil
}

// ranges returns the whole model and, where it may be split, the two parts of the first legal cut.
func (r *rig) ranges() []sdk.LayerRange {
	n := len(r.profile.Layers)
	list := []sdk.LayerRange{{Start: 0, End: n}}
	if cuts := r.cuts(); len(cuts) > 0 {
		list = append(list, sdk.LayerRange{Start: 0, End: cuts[0]}, sdk.LayerRange{Start: cuts[0], End: n})
	}
	return list
}

// weightBytes is what the profile says that a stage holds.
func (r *rig) weightBytes(layers sdk.LayerRange) int64 {
	var n int64
	for _, l := range r.profile.Layers[layers.Start:layers.End] {
		n += l.Weights
	}
	embedding, head := layers.Start == 0, layers.End == len(r.profile.Layers)
	if embedding {
		n += r.profile.Embedding
	}
	if head {
		n += r.profile.Head
	}
	if embedding && head {
		n -= r.profile.TiedBytes // one matrix serves both
	}
	return n
}

// checkProgress follows a load.
func checkProgress(ctx context.Context, r *rig) error {
	client, err := r.start()
	if err != nil {
		return err
	}
	var last sdk.LoadProgress
	var bad error
	calls := 0
	_, err = client.Load(ctx, r.request(sdk.LayerRange{End: len(r.profile.Layers)}), func(p sdk.LoadProgress) {
		calls++
		if p.Loaded < last.Loaded || p.Loaded > p.Total {
			bad = fmt.Errorf("%d of %d bytes are loaded after %d", p.Loaded, p.Total, last.Loaded)
		}
		last = p
	})
	if err != nil {
		return err
	}
	if calls == 0 {
		return errors.New("the load reported no progress")
	}
	if bad == nil && last.Loaded != last.Total {
		bad = fmt.Errorf("the load ended at %d of %d bytes", last.Loaded, last.Total)
	}
	return bad
}

// checkLoadErrors tries requests that make no sense, and after each a load that does, with the same executor.
func checkLoadErrors(ctx context.Context, r *rig) error {
	n := len(r.profile.Layers)
	good := r.request(sdk.LayerRange{End: n})
	for _, c := range []struct {
		name   string
		change func(*sdk.LoadRequest)
		codes  []sdk.Code
	}{
		{"a folder that is not there", func(q *sdk.LoadRequest) { q.Dir = filepath.Join(q.Dir, "absent") }, []sdk.Code{sdk.CodeNotFound}},
		{"layers past the last", func(q *sdk.LoadRequest) { q.Layers.End = n + 1 }, []sdk.Code{sdk.CodeInvalid}},
		{"a device that is not there", func(q *sdk.LoadRequest) { q.Device = 1 << 20 }, []sdk.Code{sdk.CodeInvalid, sdk.CodeUnsupported, sdk.CodeNotFound}},
		{"a family that is not there", func(q *sdk.LoadRequest) { q.Family = "no such family" }, []sdk.Code{sdk.CodeInvalid, sdk.CodeUnsupported, sdk.CodeNotFound}},
	} {
		client, err := r.start()
		if err != nil {
			return err
		}
		req := good
		c.change(&req)
		_, err = client.Load(ctx, req, nil)
		if err := wantCode("a load of "+c.name, err, c.codes...); err != nil {
			return err
		}
		if _, err := client.Load(ctx, good, nil); err != nil {
			return fmt.Errorf("a good load after a load of %s: %w", c.name, err)
		}
		if err := r.stop(); err != nil {
			return err
		}
	}
	return nil
}

// checkDamage loads models whose largest tensor is gone, has another shape, or is cut off: an error must name it.
// Random or zero weights in its place would be the worst answer.
func checkDamage(ctx context.Context, r *rig) error {
	for _, c := range []struct {
		name   string
		damage func(dir string) (tensor string, err error)
	}{
		{"a model without its largest tensor", r.dropLargest},
		{"a model whose largest tensor has another shape", r.reshapeLargest},
		{"a model whose file is cut off", r.cutOff},
	} {
		if err := r.loadDamaged(ctx, c.name, c.damage); err != nil {
			return err
		}
	}
	return nil
}

func (r *rig) loadDamaged(ctx context.Context, name string, damage func(dir string) (string, error)) error {
	dir, err := r.copyModel()
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	tensor, err := damage(dir)
	if err != nil {
		return err
	}
	client, err := r.start()
	if err != nil {
		return err
	}
	req := r.request(sdk.LayerRange{End: len(r.profile.Layers)})
	req.Dir = dir
	_, err = client.Load(ctx, req, nil)
	if err := wantCode("a load of "+name, err, sdk.CodeCorrupt, sdk.CodeNotFound, sdk.CodeInvalid); err != nil {
		return err
	}
	if e, _ := errors.AsType[*sdk.Error](err); e.File == "" || tensor != "" && e.Tensor != tensor {
		return fmt.Errorf("a load of %s: the error names file %q and tensor %q, want tensor %q: %w", name, e.File, e.Tensor, tensor, err)
	}
	return r.stop()
}

// copyModel makes a folder with the model's files but the weights. The caller removes it.
func (r *rig) copyModel() (dir string, err error) {
	if dir, err = os.MkdirTemp("", "sdktest-"); err != nil {
		return "", err
	}
	defer func() {
		if err != nil {
			os.RemoveAll(dir)
		}
	}()
	files, err := os.ReadDir(r.cfg.ModelDir)
	if err != nil {
		return "", err
	}
	for _, f := range files {
		if f.IsDir() || strings.HasSuffix(f.Name(), ".safetensors") || f.Name() == safetensors.IndexFile {
			continue
		}
		text, err := os.ReadFile(filepath.Join(r.cfg.ModelDir, f.Name()))
		if err != nil {
			return "", err
		}
		if err := os.WriteFile(filepath.Join(dir, f.Name()), text, 0o644); err != nil {
			return "", err
		}
	}
	return dir, nil
}

func weightsFile(dir string) string { return filepath.Join(dir, "model.safetensors") }

// entries returns the model's tensors for a new file, and which of them is the largest.
func (r *rig) entries() ([]safetensors.Entry, int, error) {
	checkpoint, err := safetensors.Open(r.cfg.ModelDir)
	if err != nil {
		return nil, 0, err
	}
	var list []safetensors.Entry
	largest, size := 0, int64(-1)
	for i, name := range checkpoint.Names() {
		t, _ := checkpoint.Lookup(name)
		if t.Size > size && len(t.Shape) == 2 {
			largest, size = i, t.Size
		}
		list = append(list, safetensors.Entry{Name: name, Dtype: t.Dtype, Shape: t.Shape, Write: copyTensor(t)})
	}
	return list, largest, nil
}

func copyTensor(t safetensors.Tensor) func(io.Writer) error {
	return func(w io.Writer) error {
		f, err := os.Open(t.Path)
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = io.Copy(w, io.NewSectionReader(f, t.Offset, t.Size))
		return err
	}
}

func (r *rig) dropLargest(dir string) (string, error) {
	list, i, err := r.entries()
	if err != nil {
		return "", err
	}
	name := list[i].Name
	return name, safetensors.WriteFile(weightsFile(dir), nil, slices.Delete(list, i, i+1))
}

func (r *rig) reshapeLargest(dir string) (string, error) {
	list, i, err := r.entries()
	if err != nil {
		return "", err
	}
	list[i].Shape = []int64{1, list[i].Shape[0] * list[i].Shape[1]}
	return list[i].Name, safetensors.WriteFile(weightsFile(dir), nil, list)
}

func (r *rig) cutOff(dir string) (string, error) {
	list, _, err := r.entries()
	if err != nil {
		return "", err
	}
	if err := safetensors.WriteFile(weightsFile(dir), nil, list); err != nil {
		return "", err
	}
	info, err := os.Stat(weightsFile(dir))
	if err != nil {
		return "", err
	}
	return "", os.Truncate(weightsFile(dir), info.Size()-1)
}

// cuts returns the layers before which the model may be split.
func (r *rig) cuts() []int {
	if !r.family.Pipeline {
		return nil
	}
	var list []int
	for cut := 1; cut < len(r.profile.Layers); cut++ {
		legal := !slices.ContainsFunc(r.profile.Adjacency, func(g sdk.AdjacencyGroup) bool {
			return g.Source < cut && cut <= g.Consumer
		})
		if legal {
			list = append(list, cut)
		}
	}
	if n := r.cfg.Cuts; n > 0 && n < len(list) {
		spread := make([]int, n)
		for i := range spread {
			spread[i] = list[i*len(list)/n]
		}
		return spread
	}
	return list
}
