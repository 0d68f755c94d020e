//! Hints for misspelt keys: the nearest known one.

use super::field::Field;

/// Minimum similarity of a hint, from 0 to 1.
const SIMILAR: f64 = 0.75;

/// Tables that a file may have: name and settings.
pub(crate) type Tables = [(&'static str, &'static [Field])];

/// The known name that is most similar to `name`, if any is similar at all.
pub(super) fn of<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let rated = known.map(|known| (strsim::normalized_damerau_levenshtein(name, known), known));
    let best = rated.max_by(|(first, _), (second, _)| first.total_cmp(second));
    best.filter(|(similarity, _)| *similarity >= SIMILAR).map(|(_, known)| known)
}

/// Last part of an error about an unknown key: the table the key belongs to, or the nearest key of this table.
pub(super) fn hint(table: &str, name: &str, tables: &Tables) -> String {
    let has = |fields: &[Field]| {
        fields.iter().any(|field| field.name != "config" && field.names().any(|known| known == name))
    };
    if let Some((other, _)) = tables.iter().find(|(_, fields)| has(fields)) {
        return match *other {
            "" => "; it belongs before the first table".to_owned(),
            other => format!("; it belongs to the table {other}"),
        };
    }
    let fields = tables.iter().filter(|(key, _)| *key == table).flat_map(|(_, fields)| fields.iter());
    let of_table = fields.filter(|field| field.name != "config").flat_map(|field| field.names());
    let names =
        of_table.chain(tables.iter().map(|(key, _)| *key).filter(|key| table.is_empty() && !key.is_empty()));
    of(name, names).map(|known| format!("; did you mean {known}?")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::of;

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
