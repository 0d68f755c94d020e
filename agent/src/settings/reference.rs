//! The reference page docs/configuration.md, generated from the declarations.

use std::fmt::Write as _;

use super::field::{Field, ValueKind, variable};
use super::kubelet::reference as kubelet_fields;
use super::{
    ControlPlaneSettings, FeatureSettings, LogSettings, NodeSettings, PathSettings, RuntimeSettings,
};
use crate::settings::table::Table as _;

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/configuration.md");

const INTRODUCTION: &str = "\
# Configuration

This page is generated from the declarations in `agent/src/settings/`. After a change there, generate it again:
`UPDATE_EXPECT=1 cargo test -p coracle-agent --bin coracle configuration_page`.

Each setting is a flag (`--max-pods 50`), an environment variable (`CORACLE_MAX_PODS=50`) and a key of the configuration
file. The first of these sources that has the setting counts:

1. the flag
2. the environment variable
3. the configuration file: the file of `--config` or `CORACLE_CONFIG`, else `/etc/coracle/config.toml` if it exists
4. the default

All invalid settings are reported together, each with its source, before anything starts.

| kind of value | flag or environment variable | TOML file |
|---|---|---|
| single value | `--max-pods 50` | `max-pods = 50` |
| switch | `--register-node=false`; the flag alone means `true` | `register-node = false` |
| list | values separated by commas; the flag may be repeated | an array: `cluster-dns = [\"10.43.0.10\"]` |
| map | `key=value` pairs separated by commas; the flag may be repeated | a table: `node-labels = { zone = \"a\" }` |

A flag that gives a list or a map replaces the whole list or map of the other sources. A file may have the settings of all
roles: `coracle agent` uses the table `node`, `coracle controlplane` the table `control-plane`, `coracle up` both, and
`coracle runtime` the table `runtime`.

Sections: [files and directories](#files-and-directories), [log](#log), [feature gates](#feature-gates), [node](#node),
[control plane](#control-plane), [runtime](#runtime), [the kubelet's configuration file](#the-kubelets-configuration-file).

";

const KUBELET: &str = "\
## The kubelet's configuration file

`--config` also accepts the kubelet's own file: a `KubeletConfiguration` of `kubelet.config.k8s.io/v1beta1` whose name ends
with `.yaml`, `.yml` or `.json`. The fields of the first table are honoured. A field of the second table has no effect,
and may only be unset or have a value of this table. Any other value is an error that names the field, as is an unknown or
repeated field. As in the kubelet, zero values such as `0s` and `\"\"` count as unset, except for fields that are pointers there.

`--config-dir` names a directory with further parts of the configuration: files with the extension `.conf`, each with
`apiVersion` and `kind`, also in subdirectories. They are merged into the file of `--config` in the order of their names, as in
the kubelet: objects are merged, arrays and single values are replaced, and `null` removes a field.

If `evictionHard` is set, signals that it does not list have no threshold, as in the kubelet. Settings without a field in
the kubelet's file are given by flags and environment variables.

";

fn page() -> String {
    let mut page = INTRODUCTION.to_owned();
    let groups: [(&str, &str, &[Field]); 6] = [
        ("Files and directories", PathSettings::KEY, PathSettings::FIELDS),
        ("Log", LogSettings::KEY, LogSettings::FIELDS),
        ("Feature gates", FeatureSettings::KEY, FeatureSettings::FIELDS),
        ("Node", NodeSettings::KEY, NodeSettings::FIELDS),
        ("Control plane", ControlPlaneSettings::KEY, ControlPlaneSettings::FIELDS),
        ("Runtime", RuntimeSettings::KEY, RuntimeSettings::FIELDS),
    ];
    for (title, key, fields) in groups {
        let place = match key {
            "" => "Keys at the top level of the file, outside of tables.".to_owned(),
            key => format!("Keys of the table `[{key}]` of the file."),
        };
        write!(page, "## {title}\n\n{place}\n\n").unwrap();
        page += "| flag and key | environment variable | kind | default | meaning |\n|---|---|---|---|---|\n";
        for field in fields {
            let names: Vec<_> = field.names().map(|name| format!("`{name}`")).collect();
            let kind = match field.value_kind {
                ValueKind::Single => field.value_name.to_lowercase(),
                ValueKind::Switch => "switch".to_owned(),
                ValueKind::List | ValueKind::Entries => {
                    format!("list of {}", field.value_name.to_lowercase())
                }
                ValueKind::Map => "map".to_owned(),
            };
            let cells = [names.join(", "), format!("`{}`", variable(field.name)), kind];
            let (default, meaning) = (field.default_text(), field.description());
            writeln!(page, "| {} | {default} | {meaning} |", cells.join(" | ")).unwrap();
        }
        page += "\n";
    }
    page += KUBELET;
    page += "| field | setting |\n|---|---|\n";
    for (field, setting) in kubelet_fields().honoured {
        writeln!(page, "| `{field}` | `{setting}` |").unwrap();
    }
    page += "\n| field without effect | values that are accepted |\n|---|---|\n";
    for (field, values) in kubelet_fields().without_effect {
        writeln!(page, "| `{field}` | {values} |").unwrap();
    }
    page
}

#[test]
fn the_configuration_page_is_current() {
    let page = page();
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        std::fs::write(PAGE, &page).unwrap();
    }
    let written = std::fs::read_to_string(PAGE).unwrap_or_default();
    assert!(written == page, "docs/configuration.md is not current: its first lines say how to generate it");
}
