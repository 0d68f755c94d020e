//! Hints for misspelt keys and variables: the nearest known name.

use super::field::{Field, PREFIX, variable};

/// Minimum similarity of a hint, from 0 to 1.
const SIMILAR: f64 = 0.75;

/// Tables that a file may have: name and settings.
pub(crate) type Tables = [(&'static str, &'static [Field])];

/// The known name that is most similar to `name`. None if no name is similar enough.
pub(super) fn of<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let rated = known.map(|known| (strsim::normalized_damerau_levenshtein(name, known), known));
    let best = rated.max_by(|(first, _), (second, _)| first.total_cmp(second));
    best.filter(|(similarity, _)| *similarity >= SIMILAR).map(|(_, known)| known)
}

/// Last part of an error about an unknown key. It names the table that has the key, or the nearest key of this table or
/// of another table.
pub(super) fn hint(table: &str, name: &str, tables: &Tables) -> String {
    if let Some((other, _)) = tables.iter().find(|(_, fields)| keys(fields).any(|known| known == name)) {
        return format!("; it belongs {}", place(other));
    }
    let of_table = tables.iter().filter(|(key, _)| *key == table).flat_map(|(_, fields)| keys(fields));
    let tables_of_file = table_names(tables).filter(|_| table.is_empty());
    if let Some(known) = of(name, of_table.chain(tables_of_file)) {
        return format!("; did you mean {known}?");
    }
    let Some(known) = of(name, tables.iter().flat_map(|(_, fields)| keys(fields))) else {
        return String::new();
    };
    let other = tables.iter().find(|(_, fields)| keys(fields).any(|key| key == known));
    let other = other.map(|(other, _)| place(other)).unwrap_or_default();
    format!("; did you mean {known}, {other}?")
}

/// Last part of an error about an unknown table. It is the text of [`hint`], or the list of all tables.
pub(super) fn table_hint(name: &str, tables: &Tables) -> String {
    let hint = hint("", name, tables);
    if !hint.is_empty() {
        return hint;
    }
    format!("; the tables are {}", table_names(tables).collect::<Vec<_>>().join(", "))
}

/// The environment variable of a setting that is most similar to `name`.
pub(super) fn variable_like(name: &str, tables: &Tables) -> Option<String> {
    let key = name.strip_prefix(PREFIX)?.replace('_', "-").to_lowercase();
    of(&key, tables.iter().flat_map(|(_, fields)| fields.iter()).flat_map(Field::names)).map(variable)
}

/// The keys that a file may have in a table: all but `config` and `config-dir`, which name the files.
fn keys(fields: &'static [Field]) -> impl Iterator<Item = &'static str> {
    fields.iter().filter(|field| !["config", "config-dir"].contains(&field.name)).flat_map(Field::names)
}

fn table_names(tables: &Tables) -> impl Iterator<Item = &'static str> {
    tables.iter().map(|(key, _)| *key).filter(|key| !key.is_empty())
}

fn place(table: &str) -> String {
    match table {
        "" => "before the first table".to_owned(),
        table => format!("in the table {table}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::TABLES;
    use super::{hint, of, table_hint, variable_like};

    #[test]
    fn a_key_of_another_table_is_a_hint() {
        assert_eq!(hint("node", "bridgge", TABLES), "; did you mean bridge?");
        assert_eq!(hint("", "node-nam", TABLES), "; did you mean node-name, in the table node?");
        assert_eq!(hint("", "node-name", TABLES), "; it belongs in the table node");
        assert_eq!(hint("node", "state-dirr", TABLES), "; did you mean state-dir, before the first table?");
        assert_eq!(hint("node", "state-dir", TABLES), "; it belongs before the first table");
        assert_eq!(hint("node", "color", TABLES), "");
        assert_eq!(hint("", "config", TABLES), "", "a file cannot have the key that names the file");
    }

    #[test]
    fn an_unknown_table_names_the_nearest_or_all() {
        assert_eq!(table_hint("node-labels", TABLES), "; it belongs in the table node");
        assert_eq!(table_hint("controlplane", TABLES), "; did you mean control-plane?");
        assert_eq!(table_hint("kubelet", TABLES), "; the tables are node, control-plane, runtime");
    }

    #[test]
    fn a_misspelt_variable_names_the_nearest() {
        assert_eq!(variable_like("CORACLE_MAXPODS", TABLES), Some("CORACLE_MAX_PODS".to_owned()));
        assert_eq!(variable_like("CORACLE_X", TABLES), None);
    }

    #[test]
    fn the_nearest_name_is_a_hint_if_it_is_near() {
        let known = ["bridge", "max-pods", "mtu", "node-ip", "node-name"];
        let of = |name| of(name, known.into_iter());
        assert_eq!(of("brigde"), Some("bridge"));
        assert_eq!(of("max-pod"), Some("max-pods"));
        assert_eq!(of("node_name"), Some("node-name"));
        assert_eq!(of("color"), None);
        assert_eq!(of(""), None);
    }
}
