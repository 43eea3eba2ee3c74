package partition

import (
	"errors"
	"fmt"
	"math"
	"math/big"
	"strconv"
	"strings"
)

const (
	memoryFlag    = "--stage-memory"
	headroomFlag  = "--memory-headroom"
	speedFlag     = "--stage-speed"
	objectiveFlag = "--pp-objective"
)

// units of sizes, in the order in which they are looked for at a text's end.
var units = []struct {
	name  string
	bytes int64
}{
	{"kib", 1 << 10}, {"mib", 1 << 20}, {"gib", 1 << 30}, {"tib", 1 << 40},
	{"kb", 1e3}, {"mb", 1e6}, {"gb", 1e9}, {"tb", 1e12}, {"bytes", 1}, {"b", 1},
}

const sizeHint = "write a number with KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (powers of 1024) or nothing (bytes), e.g. 16GiB"

// ParseSize reads a number of bytes such as "16GiB", "1.5 TB" or "4096". Parts of a byte are dropped.
func ParseSize(text string) (int64, error) {
	number := strings.ToLower(strings.TrimSpace(text))
	unit := int64(1)
	for _, u := range units {
		if rest, ok := strings.CutSuffix(number, u.name); ok {
			number, unit = strings.TrimSpace(rest), u.bytes
			break
		}
	}
	if !isDecimal(number) {
		return 0, fmt.Errorf("%q is no size: %s", text, sizeHint)
	}
	value, ok := new(big.Rat).SetString(number)
	if !ok {
		return 0, fmt.Errorf("%q is no size: %s", text, sizeHint)
	}
	value.Mul(value, new(big.Rat).SetInt64(unit))
	bytes := new(big.Int).Quo(value.Num(), value.Denom())
	if !bytes.IsInt64() || bytes.Int64() >= tooMuch {
		return 0, fmt.Errorf("%q is more memory than any machine has", text)
	}
	return bytes.Int64(), nil
}

// maxDigits bounds the numbers that isDecimal takes, so that a long text costs nothing.
const maxDigits = 32

// isDecimal takes digits with a decimal point at most: no sign, exponent, fraction bar or separator.
func isDecimal(s string) bool {
	whole, part, point := strings.Cut(s, ".")
	digits := func(s string) bool { return s != "" && strings.Trim(s, "0123456789") == "" }
	return len(s) <= maxDigits && digits(whole) && (!point || digits(part))
}

// FormatSize writes bytes for a reader.
func FormatSize(n int64) string {
	const unit = 1024
	if n < unit {
		return fmt.Sprintf("%d B", n)
	}
	value, name := float64(n)/unit, "KiB"
	for _, next := range []string{"MiB", "GiB", "TiB", "PiB", "EiB"} {
		if value < unit {
			break
		}
		value, name = value/unit, next
	}
	return fmt.Sprintf("%.1f %s", value, name)
}

// ParseStageMemory reads the value of --stage-memory: what each stage may use, e.g. "16GiB,64GiB". All faults are
// returned together.
func ParseStageMemory(value string) ([]int64, error) {
	return list(memoryFlag, value, func(stage int, part string) (int64, string) {
		n, err := ParseSize(part)
		switch {
		case strings.TrimSpace(part) == "":
			return 0, fmt.Sprintf("the memory of stage %d is blank: remove the extra comma or give a size", stage)
		case err != nil:
			return 0, fmt.Sprintf("stage %d: %v", stage, err)
		case n == 0:
			return 0, fmt.Sprintf("stage %d may use 0 bytes: a stage needs memory", stage)
		}
		return n, ""
	})
}

// ParseSpeeds reads the value of --stage-speed: the stages' speeds relative to each other, e.g. "1,2.5".
func ParseSpeeds(value string) ([]float64, error) {
	return list(speedFlag, value, func(stage int, part string) (float64, string) {
		part = strings.TrimSpace(part)
		v, err := strconv.ParseFloat(part, 64)
		if err != nil || !isDecimal(part) || !validSpeed(v) {
			return 0, fmt.Sprintf("stage %d: %q is no speed: give a number above 0, e.g. 2.5", stage, part)
		}
		return v, ""
	})
}

// validSpeed keeps quotients of sizes and speeds far from what floats can't hold.
func validSpeed(v float64) bool { return v >= 1e-9 && v <= 1e9 }

// FormatSpeeds writes speeds as --stage-speed takes them.
func FormatSpeeds(speeds []float64) string {
	text := make([]string, len(speeds))
	for i, v := range speeds {
		text[i] = strconv.FormatFloat(v, 'f', -1, 64)
	}
	return strings.Join(text, ",")
}

// list reads one value for each stage; parse returns what is wrong with a part, if anything.
func list[T any](flag, value string, parse func(stage int, part string) (T, string)) ([]T, error) {
	var out []T
	var faults []error
	for i, part := range strings.Split(value, ",") {
		v, reason := parse(i, part)
		if reason != "" {
			faults = append(faults, &FlagError{flag, value, reason})
		}
		out = append(out, v)
	}
	if len(faults) > 0 {
		return nil, errors.Join(faults...)
	}
	return out, nil
}

// ParseObjective reads the value of --pp-objective.
func ParseObjective(value string) (Objective, error) {
	switch o := Objective(value); o {
	case ObjectiveMemory, ObjectiveSpeed:
		return o, nil
	}
	return "", &FlagError{objectiveFlag, value, fmt.Sprintf("give %s (the heaviest stage as light as can be) or %s (the slowest stage as fast as can be)", ObjectiveMemory, ObjectiveSpeed)}
}

// Headroom is what a plan leaves of a device's memory: a part of it, for the system and for what a plan can't know,
// and a fixed number of bytes for each stage, for its runtime, activations and logits.
type Headroom struct {
	Percent float64 // of the memory, below 100
	Fixed   int64   // bytes, for each stage on it
}

// DefaultHeadroom is taken off what a device reports.
func DefaultHeadroom() Headroom { return Headroom{Percent: 10, Fixed: 256 << 20} }

// ParseHeadroom reads the value of --memory-headroom: a part of the memory, a size or both, e.g. "5%", "2GiB" or
// "10%+256MiB".
func ParseHeadroom(value string) (Headroom, error) {
	fault := func(reason string) (Headroom, error) {
		return Headroom{}, &FlagError{headroomFlag, value, reason + `: give a part of the memory, a size or both, e.g. "5%", "2GiB" or "10%+256MiB"`}
	}
	var h Headroom
	var seenPart, seenSize bool
	for _, part := range strings.Split(value, "+") {
		part = strings.TrimSpace(part)
		if number, ok := strings.CutSuffix(part, "%"); ok {
			percent, err := strconv.ParseFloat(number, 64)
			if err != nil || !isDecimal(number) || percent >= 100 {
				return fault(fmt.Sprintf("%q is no part from 0%% to below 100%%", part))
			}
			if seenPart {
				return fault("two parts")
			}
			h.Percent, seenPart = percent, true
			continue
		}
		n, err := ParseSize(part)
		if err != nil {
			return fault(err.Error())
		}
		if seenSize {
			return fault("two sizes")
		}
		h.Fixed, seenSize = n, true
	}
	return h, nil
}

// String writes the headroom as --memory-headroom takes it.
func (h Headroom) String() string {
	return fmt.Sprintf("%s%%+%dB", strconv.FormatFloat(h.Percent, 'f', -1, 64), h.Fixed)
}

// Of returns what so many stages on a device may use of its memory; zero or less when it is all headroom.
func (h Headroom) Of(memory int64, stages int) int64 {
	part := int64(math.Ceil(float64(memory) * h.Percent / 100))
	return memory - part - multiply(h.Fixed, int64(stages))
}
