package serve

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/pelletier/go-toml/v2"
	"github.com/urfave/cli/v2"
)

// applyFile sets the flags that neither the command line nor the environment has set from a TOML file. Its keys are the flags'
// names. All faults of the file are told at once.
func applyFile(c *cli.Context, path string) error {
	raw, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("--config: %w", err)
	}
	var values map[string]any
	if err := toml.Unmarshal(raw, &values); err != nil {
		if d, ok := errors.AsType[*toml.DecodeError](err); ok {
			row, column := d.Position()
			return fmt.Errorf("%s:%d:%d: %w", path, row, column, err)
		}
		return fmt.Errorf("%s: %w", path, err)
	}
	flags := map[string]cli.Flag{}
	for _, f := range Flags() {
		flags[f.Names()[0]] = f
	}
	var faults []error
	for _, key := range slices.Sorted(maps.Keys(values)) {
		if err := applyKey(c, flags[key], key, values[key]); err != nil {
			faults = append(faults, fmt.Errorf("%s: %w", path, err))
		}
	}
	return errors.Join(faults...)
}

func applyKey(c *cli.Context, f cli.Flag, key string, value any) error {
	if f == nil || key == "config" {
		return fmt.Errorf("unknown key %q; the keys are the names of flags, see --help", key)
	}
	texts, err := flagTexts(f, value)
	if err != nil {
		return fmt.Errorf("%s: %w", key, err)
	}
	if c.IsSet(key) {
		return nil
	}
	for _, text := range texts {
		if err := c.Set(key, text); err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
	}
	return nil
}

// flagTexts writes a value as the command line would have it.
func flagTexts(f cli.Flag, value any) ([]string, error) {
	list, isList := value.([]any)
	switch f.(type) {
	case *cli.StringSliceFlag:
		if !isList {
			list = []any{value}
		}
		var texts []string
		for _, v := range list {
			s, ok := v.(string)
			if !ok {
				return nil, wrongType("a string or an array of strings", v)
			}
			texts = append(texts, s)
		}
		return texts, nil
	case *cli.BoolFlag:
		if b, ok := value.(bool); ok {
			return []string{strconv.FormatBool(b)}, nil
		}
		return nil, wrongType("true or false", value)
	case *cli.IntFlag:
		if n, ok := value.(int64); ok {
			return []string{strconv.FormatInt(n, 10)}, nil
		}
		return nil, wrongType("a whole number", value)
	case *cli.Float64Flag:
		switch n := value.(type) {
		case int64:
			return []string{strconv.FormatInt(n, 10)}, nil
		case float64:
			return []string{strconv.FormatFloat(n, 'g', -1, 64)}, nil
		}
		return nil, wrongType("a number", value)
	}
	if s, ok := value.(string); ok {
		return []string{s}, nil
	}
	return nil, wrongType("a string", value)
}

func wrongType(want string, got any) error {
	name := fmt.Sprintf("%T", got)
	switch got.(type) {
	case string:
		name = "a string"
	case int64, float64:
		name = "a number"
	case bool:
		name = "true or false"
	case []any:
		name = "an array"
	case map[string]any:
		name = "a table"
	}
	return fmt.Errorf("wanted %s, got %s", want, strings.TrimSpace(name))
}
