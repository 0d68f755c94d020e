//! Media types and the preferences of the header `Accept` (RFC 9110, 12.5.1).

use std::cmp::Reverse;

/// Maximum media types of a header `Accept` that are read.
const MAX_TYPES: usize = 64;

/// A media type or a range of media types, such as `application/json;q=0.5` or `*/*`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediaType<'a> {
    /// Type and subtype in lower case, `application/json`.
    pub name: String,
    parameters: Vec<Parameter<'a>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Parameter<'a> {
    name: &'a str,
    /// Value of the parameter, without quotes.
    value: &'a str,
}

/// The media types of a header `Accept`, in the client's order of preference, without those of quality 0. Of equal
/// qualities, types without wildcards come first.
#[must_use]
pub fn preferences(accept: &str) -> Vec<MediaType<'_>> {
    let mut types: Vec<MediaType<'_>> =
        accept.split(',').take(MAX_TYPES).filter_map(MediaType::parse).collect();
    types.retain(|media| media.quality() > 0);
    // The sort is stable: media types of equal rank keep the client's order.
    types.sort_by_key(|media| (Reverse(media.quality()), media.wildcards()));
    types
}

// === impl MediaType ===

impl<'a> MediaType<'a> {
    /// Parses one media type. `None` if it has no name.
    #[must_use]
    pub fn parse(text: &'a str) -> Option<Self> {
        let mut parts = text.split(';').map(str::trim);
        let name = parts.next().filter(|name| !name.is_empty())?.to_ascii_lowercase();
        let parameters = parts.filter_map(|part| part.split_once('='));
        let parameters = parameters
            .map(|(name, value)| Parameter { name: name.trim(), value: value.trim().trim_matches('"') });
        Some(Self { name, parameters: parameters.collect() })
    }

    /// The value of a parameter, without quotes.
    #[must_use]
    pub fn parameter(&self, name: &str) -> Option<&'a str> {
        self.parameters.iter().find(|parameter| parameter.name == name).map(|parameter| parameter.value)
    }

    /// The quality (parameter `q`) in thousandths. The default is 1000.
    fn quality(&self) -> u32 {
        let quality = self.parameter("q").and_then(|q| q.parse::<f32>().ok()).unwrap_or(1.0);
        // A quality is between 0 and 1.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to 0..=1000")]
        let thousandths = (quality.clamp(0.0, 1.0) * 1000.0) as u32;
        thousandths
    }

    /// Number of wildcards: 2 for any type, 1 for any subtype.
    fn wildcards(&self) -> usize {
        self.name.split('/').filter(|part| *part == "*").count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(accept: &str) -> Vec<String> {
        preferences(accept).into_iter().map(|media| media.name).collect()
    }

    #[test]
    fn preferences_are_ordered_by_quality_then_by_wildcards() {
        assert_eq!(
            names("*/*, text/*, text/plain, a/b;q=0.5, Text/HTML"),
            ["text/plain", "text/html", "text/*", "*/*", "a/b"]
        );
        assert_eq!(names("a/b;q=0, c/d; q=\"0.2\", e/f;q=7, g/h;q=x"), ["e/f", "g/h", "c/d"]);
        assert_eq!(names(" , ;q=1"), Vec::<String>::new());
    }

    #[test]
    fn parameters_have_no_quotes_and_any_order() {
        let media = MediaType::parse("application/json; v = \"v1\";as=Table;flag").unwrap();
        assert_eq!((media.parameter("v"), media.parameter("as")), (Some("v1"), Some("Table")));
        assert_eq!((media.parameter("flag"), media.parameter("q")), (None, None));
    }

    #[test]
    fn a_header_with_many_types_is_read_in_part() {
        let accept = vec!["a/b"; MAX_TYPES + 1].join(",");
        assert_eq!(preferences(&accept).len(), MAX_TYPES);
    }
}
