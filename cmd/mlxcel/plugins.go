package main

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/mlxcel/mlxcel/host/engine"
	"github.com/mlxcel/mlxcel/host/executor"
	"github.com/urfave/cli/v2"
)

func pluginsCommand() *cli.Command {
	return &cli.Command{
		Name:  "plugins",
		Usage: "list the executors found, and why one is not used",
		Flags: append(pluginFlags(), &cli.BoolFlag{Name: "json", Usage: "print one JSON object"}),
		Action: func(c *cli.Context) error {
			found, err := engine.Plugins(c.Context, engineConfig(c))
			if err != nil {
				return err
			}
			if c.Bool("json") {
				return printJSON(c.App.Writer, pluginsJSON(found))
			}
			for _, e := range found.Entries {
				fmt.Fprint(c.App.Writer, describePlugin(e))
			}
			if len(found.Entries) == 0 {
				fmt.Fprintln(c.App.Writer, "no executor found")
			}
			fmt.Fprintf(c.App.Writer, "looked in: %s\n", strings.Join(found.Folders, ", "))
			return nil
		},
	}
}

func describePlugin(e executor.Entry) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n  path      %s\n", e.Name, e.Path)
	if e.Version != "" {
		fmt.Fprintf(&b, "  version   %s (contract %d, %s)\n", e.Version, e.ContractVersion, e.Runtime)
	}
	fmt.Fprintf(&b, "  checksum  %s\n", e.Checksum)
	if e.Device.Kind != "" {
		fmt.Fprintf(&b, "  device    %s\n", deviceText(e))
	}
	if len(e.Families) > 0 {
		fmt.Fprintf(&b, "  families  %s\n", familiesText(e))
	}
	for _, s := range e.Shadowed {
		fmt.Fprintf(&b, "  not used for %s: %s comes first\n", s.Family, s.By)
	}
	if e.Problem != nil {
		fmt.Fprintf(&b, "  not used  %v\n", e.Problem)
	}
	return b.String()
}

func deviceText(e executor.Entry) string {
	text := e.Device.Kind
	if e.Device.Name != "" {
		text += " (" + e.Device.Name + ")"
	}
	return fmt.Sprintf("%s, %s memory, %s free", text, size(e.Device.TotalMemory), size(e.Device.FreeMemory))
}

func familiesText(e executor.Entry) string {
	var list []string
	for _, f := range e.Families {
		text := fmt.Sprintf("%s (%s)", f.Name, strings.Join(f.Quantizations, ", "))
		if f.PlanOnly {
			text += " plan only"
		}
		list = append(list, text)
	}
	return strings.Join(list, "; ")
}

// pluginJSON is one executor in the output of plugins --json.
type pluginJSON struct {
	Name            string   `json:"name"`
	Path            string   `json:"path"`
	Version         string   `json:"version"`
	ContractVersion int      `json:"contract_version"`
	Checksum        string   `json:"checksum"`
	Families        []string `json:"families"`
	Device          string   `json:"device"`
	Used            bool     `json:"used"`
	Reason          string   `json:"reason,omitempty"` // why it is not used
}

func pluginsJSON(found *engine.PluginList) map[string]any {
	list := []pluginJSON{}
	for _, e := range found.Entries {
		p := pluginJSON{
			Name: e.Name, Path: e.Path, Version: e.Version, ContractVersion: e.ContractVersion,
			Checksum: e.Checksum.String(), Families: []string{}, Device: e.Device.Kind, Used: e.Used(),
		}
		for _, f := range e.Families {
			p.Families = append(p.Families, f.Name)
		}
		if e.Problem != nil {
			p.Reason = e.Problem.Error()
		}
		list = append(list, p)
	}
	return map[string]any{"plugins": list, "folders": found.Folders}
}

func printJSON(w interface{ Write([]byte) (int, error) }, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	return e.Encode(v)
}
