//! Names of units and the paths of their cgroups (systemd.slice(5), systemd.unit(5)). Pure.

/// Suffixes of unit names.
const SLICE: &str = ".slice";
const SCOPE: &str = ".scope";

/// A scope in the form of the OCI runtime specification's `cgroupsPath`: `slice:prefix:name`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scope {
    /// The slice of the scope, such as `kubepods-burstable.slice`.
    pub slice: String,
    prefix: String,
    name: String,
}

// === impl Scope ===

impl Scope {
    /// The scope `prefix-name.scope` of a slice.
    pub fn new(slice: &str, prefix: &str, name: &str) -> Self {
        Self { slice: slice.to_owned(), prefix: prefix.to_owned(), name: name.to_owned() }
    }

    /// Parses `slice:prefix:name`. `None` for other formats.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(':');
        let scope = Self::new(parts.next()?, parts.next()?, parts.next()?);
        let fits = |part: &str| !part.is_empty() && !part.contains('/');
        let whole = parts.next().is_none() && fits(&scope.prefix) && fits(&scope.name);
        (whole && is_slice(&scope.slice)).then_some(scope)
    }

    /// The scope of a cgroup path. `None` if the path does not belong to a scope.
    pub fn of_path(path: &str) -> Option<Self> {
        let (slice, unit) = path.trim_end_matches('/').rsplit_once('/')?;
        let (prefix, name) = unit.strip_suffix(SCOPE)?.rsplit_once('-')?;
        let slice = of_path(slice).map_or_else(|| slice_of([]), str::to_owned);
        Some(Self::new(&slice, prefix, name))
    }

    /// The unit's name.
    pub fn unit(&self) -> String {
        format!("{}-{}{SCOPE}", self.prefix, self.name)
    }

    /// Path of the scope's cgroup below the hierarchy's mount.
    pub fn path(&self) -> String {
        format!("{}/{}", slice_path(&self.slice), self.unit())
    }
}

impl std::fmt::Display for Scope {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}:{}", self.slice, self.prefix, self.name)
    }
}

/// Whether a string is the name of a slice: components separated by dashes, none of them empty.
pub fn is_slice(name: &str) -> bool {
    let stem = name.strip_suffix(SLICE);
    let fits = |part: &str| {
        !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.\\@".contains(&b))
    };
    stem.is_some_and(|stem| stem == "-" || stem.split('-').all(fits))
}

/// The slice with these nested names. Dashes separate components, so dashes in a name become underscores, as in the
/// kubelet. Without names, it is the root `-.slice`.
pub fn slice_of<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let names: Vec<String> = names.into_iter().map(|name| name.replace('-', "_")).collect();
    if names.is_empty() { format!("-{SLICE}") } else { names.join("-") + SLICE }
}

/// Path of a slice's cgroup below the hierarchy's mount: `a-b.slice` is `/a.slice/a-b.slice`; the root is
/// empty.
pub fn slice_path(slice: &str) -> String {
    let stem = slice.strip_suffix(SLICE).unwrap_or(slice);
    let ends = stem.match_indices('-').map(|(at, _)| at).chain([stem.len()]);
    let all = ends.filter(|_| stem != "-").filter_map(|end| stem.get(..end));
    all.map(|part| format!("/{part}{SLICE}")).collect()
}

/// The unit of a cgroup path. `None` if systemd did not make the cgroup.
pub fn of_path(path: &str) -> Option<&str> {
    let last = path.trim_end_matches('/').rsplit('/').next()?;
    (last.ends_with(SLICE) || last.ends_with(SCOPE)).then_some(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slices_path_contains_all_its_parent_slices() {
        assert_eq!(slice_path("-.slice"), "");
        assert_eq!(slice_path("kubepods.slice"), "/kubepods.slice");
        let pod = slice_of(["kubepods", "besteffort", "pod1-2-3"]);
        assert_eq!(pod, "kubepods-besteffort-pod1_2_3.slice");
        assert_eq!(
            slice_path(&pod),
            "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1_2_3.slice"
        );
        assert_eq!(slice_of([]), "-.slice");
    }

    #[test]
    fn a_scope_is_parsed_from_the_format_of_the_runtime_specification() {
        let scope = Scope::parse("kubepods-pod1.slice:cri-coracle:f00").unwrap();
        assert_eq!(scope.unit(), "cri-coracle-f00.scope");
        assert_eq!(scope.path(), "/kubepods.slice/kubepods-pod1.slice/cri-coracle-f00.scope");
        assert_eq!(scope.to_string(), "kubepods-pod1.slice:cri-coracle:f00");
        assert_eq!(Scope::of_path(&scope.path()), Some(scope));
        assert_eq!(Scope::of_path("/x-y.scope").unwrap().slice, "-.slice");
        assert_eq!(Scope::of_path("/kubepods/pod1/f00"), None);
        for wrong in
            ["/a/b", "a:b:c", "a.slice:b", "a.slice:b:", "a.slice:b:c:d", "a--b.slice:b:c", "a.slice:b/..:c"]
        {
            assert_eq!(Scope::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn slice_names_have_no_empty_component_and_no_slash() {
        assert!(is_slice("-.slice") && is_slice("a.slice") && is_slice("a-b_c.slice"));
        for wrong in ["", ".slice", "a", "a-.slice", "-a.slice", "a--b.slice", "/a.slice", "a b.slice"] {
            assert!(!is_slice(wrong), "{wrong}");
        }
    }

    #[test]
    fn units_are_recognized_by_the_last_path_component() {
        assert_eq!(of_path("/a.slice/a-b.slice"), Some("a-b.slice"));
        assert_eq!(of_path("/a.slice/x.scope/"), Some("x.scope"));
        assert_eq!(of_path("/a.slice/x.scope/inner"), None);
        assert_eq!(of_path("/kubepods/pod1"), None);
    }
}
