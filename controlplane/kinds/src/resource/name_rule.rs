//! Rules for the names of objects.

/// Rule for `metadata.name`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameRule {
    /// DNS label (RFC 1123).
    Dns1123Label,
    /// DNS subdomain (RFC 1123).
    Dns1123Subdomain,
    /// One segment of a URL path.
    PathSegment,
}
