//! The name of this machine.

/// The machine's name in lower case, if it can be a part of a certificate.
pub(crate) fn host_name() -> Option<String> {
    let name = nix::unistd::gethostname().ok()?.into_string().ok()?;
    let valid =
        !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-.".contains(&byte));
    valid.then(|| name.to_ascii_lowercase())
}
