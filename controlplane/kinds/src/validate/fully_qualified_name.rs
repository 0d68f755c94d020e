//! Fully qualified names. Source: `IsFullyQualifiedName` of `apimachinery/pkg/util/validation`.

use super::{Causes, Path, format};

/// Checks a name that must be a domain with at least three segments.
pub(super) fn check(causes: &mut Causes, path: &Path, name: &str) {
    if name.is_empty() {
        causes.required(path, "");
        return;
    }
    let problems = format::dns1123_subdomain(name);
    if problems.is_empty() && name.split('.').count() < 3 {
        let detail = "should be a domain with at least three segments separated by dots";
        causes.invalid(path, &name.into(), detail);
    }
    causes.format(path, name, problems);
}
