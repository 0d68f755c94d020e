//! Names of units, and where their cgroups are (systemd.slice(5), systemd.unit(5)). Pure.

/// What a slice's name ends with.
const SLICE: &str = ".slice";
const SCOPE: &str = ".scope";

/// A scope as the runtime specification's `cgroupsPath` names it: `slice:prefix:name`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scope {
    /// The slice that it is in, such as `kubepods-burstable.slice`.
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

    /// Reads `slice:prefix:name`; none if it is something else.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(':');
        let scope = Self::new(parts.next()?, parts.next()?, parts.next()?);
        let fits = |part: &str| !part.is_empty() && !part.contains('/');
        let whole = parts.next().is_none() && fits(&scope.prefix) && fits(&scope.name);
        (whole && is_slice(&scope.slice)).then_some(scope)
    }

    /// The scope whose cgroup a path is; none if it is no scope's.
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

    /// Its cgroup, below the hierarchy's mount.
    pub fn path(&self) -> String {
        format!("{}/{}", slice_path(&self.slice), self.unit())
    }
}

impl std::fmt::Display for Scope {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}:{}", self.slice, self.prefix, self.name)
    }
}

/// Whether it is the name of a slice: dashes part it, and none of its parts is empty.
pub fn is_slice(name: &str) -> bool {
    let stem = name.strip_suffix(SLICE);
    let fits = |part: &str| {
        !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.\\@".contains(&b))
    };
    stem.is_some_and(|stem| stem == "-" || stem.split('-').all(fits))
}

/// The slice of these names, each below the one before. A dash in a name would part it, and becomes an underscore,
/// as the kubelet has it. Without any it is the root, `-.slice`.
pub fn slice_of<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let names: Vec<String> = names.into_iter().map(|name| name.replace('-', "_")).collect();
    if names.is_empty() { format!("-{SLICE}") } else { names.join("-") + SLICE }
}

/// Where a slice's cgroup is, below the hierarchy's mount: `a-b.slice` is `/a.slice/a-b.slice`, the root is empty.
pub fn slice_path(slice: &str) -> String {
    let stem = slice.strip_suffix(SLICE).unwrap_or(slice);
    let ends = stem.match_indices('-').map(|(at, _)| at).chain([stem.len()]);
    let all = ends.filter(|_| stem != "-").filter_map(|end| stem.get(..end));
    all.map(|part| format!("/{part}{SLICE}")).collect()
}

/// The unit whose cgroup a path is; none if systemd has not made it.
pub fn of_path(path: &str) -> Option<&str> {
    let last = path.trim_end_matches('/').rsplit('/').next()?;
    (last.ends_with(SLICE) || last.ends_with(SCOPE)).then_some(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slices_path_is_that_of_all_slices_that_it_is_in() {
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
    fn a_scope_is_named_as_the_runtime_specification_has_it() {
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
    fn a_slices_name_has_no_empty_part_and_no_path() {
        assert!(is_slice("-.slice") && is_slice("a.slice") && is_slice("a-b_c.slice"));
        for wrong in ["", ".slice", "a", "a-.slice", "-a.slice", "a--b.slice", "/a.slice", "a b.slice"] {
            assert!(!is_slice(wrong), "{wrong}");
        }
    }

    #[test]
    fn what_systemd_made_is_known_by_its_paths_end() {
        assert_eq!(of_path("/a.slice/a-b.slice"), Some("a-b.slice"));
        assert_eq!(of_path("/a.slice/x.scope/"), Some("x.scope"));
        assert_eq!(of_path("/a.slice/x.scope/inner"), None);
        assert_eq!(of_path("/kubepods/pod1"), None);
    }
}
