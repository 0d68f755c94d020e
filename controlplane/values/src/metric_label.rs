//! Values of labels in the text format of Prometheus.

/// Escapes backslashes, double quotes and line feeds in the value of a label.
#[must_use]
pub fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_backslashes_and_ends_of_lines_are_escaped() {
        assert_eq!(escaped("zone-a"), "zone-a");
        assert_eq!(escaped("a\"b\\c\nd"), "a\\\"b\\\\c\\nd");
    }
}
