//! The seccomp filter of a container and of its execs: a BPF program that the runtime has compiled.

use std::io;

use libcontainer::oci_spec::runtime::{LinuxSeccompFilterFlag, Spec};

use crate::kernel;

/// Name of the file that keeps the program for execs. The file is in the directory of the container's spec.
pub(crate) const FILE: &str = "seccomp.bpf";

/// Bytes of an instruction (`struct sock_filter`).
const INSTRUCTION: usize = 8;

/// A seccomp filter to load.
#[derive(Debug)]
pub(crate) struct Filter {
    program: Vec<u8>,
    flags: u32,
}

// === impl Filter ===

impl Filter {
    /// The filter that a spec requires.
    ///
    /// # Errors
    /// The program is missing or incomplete. A container never runs without the filter that its spec
    /// requires.
    pub(crate) fn of(
        spec: &Spec,
        program: impl FnOnce() -> io::Result<Vec<u8>>,
    ) -> io::Result<Option<Filter>> {
        let Some(profile) = spec.linux().as_ref().and_then(|linux| linux.seccomp().as_ref()) else {
            return Ok(None);
        };
        let program = check_complete(program()?)?;
        let flags = profile.flags().iter().flatten().map(|flag| bit(*flag)).fold(0, |all, bit| all | bit);
        Ok(Some(Filter { program, flags }))
    }

    /// The filter of a process without a spec. `None` without a program.
    ///
    /// # Errors
    /// The program is incomplete, or a flag is unknown.
    pub(crate) fn of_program(program: &[u8], flags: &[String]) -> io::Result<Option<Filter>> {
        if program.is_empty() {
            return Ok(None);
        }
        let one = |name: &String| serde_json::from_value(name.clone().into()).map(bit);
        let bits: Vec<u32> = flags.iter().map(one).collect::<Result<_, _>>()?;
        let flags = bits.into_iter().fold(0, |all, bit| all | bit);
        Ok(Some(Filter { program: check_complete(program.to_vec())?, flags }))
    }

    /// Loads the filter. Needs CAP_SYS_ADMIN or no-new-privileges.
    pub(crate) fn load(&self) -> io::Result<()> {
        kernel::set_filter(&self.program, self.flags)
    }
}

fn check_complete(program: Vec<u8>) -> io::Result<Vec<u8>> {
    if program.is_empty() || !program.len().is_multiple_of(INSTRUCTION) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the compiled seccomp program is incomplete"));
    }
    Ok(program)
}

/// The flag bits of seccomp(2). `WAIT_KILLABLE_RECV` is ignored, because it applies only to filters with a listener.
fn bit(flag: LinuxSeccompFilterFlag) -> u32 {
    match flag {
        LinuxSeccompFilterFlag::SeccompFilterFlagTsync => 1,
        LinuxSeccompFilterFlag::SeccompFilterFlagLog => 1 << 1,
        LinuxSeccompFilterFlag::SeccompFilterFlagSpecAllow => 1 << 2,
        LinuxSeccompFilterFlag::SeccompFilterFlagWaitKillableRecv => 0,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(seccomp: serde_json::Value, program: &[u8]) -> io::Result<Option<Filter>> {
        let spec = json!({"ociVersion": "1.2.0", "linux": {"seccomp": seccomp}});
        Filter::of(&serde_json::from_value(spec).unwrap(), || Ok(program.to_vec()))
    }

    #[test]
    fn a_profile_without_a_complete_program_is_refused() {
        let profile = || json!({"defaultAction": "SCMP_ACT_ERRNO"});
        for length in [0, 7, 12] {
            assert!(of(profile(), &vec![0; length]).is_err(), "{length} bytes");
        }
        assert!(of(profile(), &[0; 16]).unwrap().is_some());
        assert!(of(serde_json::Value::Null, &[]).unwrap().is_none());
    }

    #[test]
    fn a_filter_without_a_spec_has_a_program_and_named_flags() {
        let named = |flags: &[&str]| -> Vec<String> { flags.iter().map(|flag| (*flag).to_owned()).collect() };
        let flags = named(&["SECCOMP_FILTER_FLAG_LOG", "SECCOMP_FILTER_FLAG_SPEC_ALLOW"]);
        let filter = Filter::of_program(&[0; 8], &flags).unwrap();
        assert_eq!(filter.map(|filter| filter.flags), Some(6));
        assert!(Filter::of_program(&[], &[]).unwrap().is_none());
        assert!(Filter::of_program(&[0; 7], &[]).is_err());
        assert!(Filter::of_program(&[0; 8], &named(&["LOG"])).is_err());
    }

    #[test]
    fn flags_are_those_of_the_kernel() {
        let flags = ["SECCOMP_FILTER_FLAG_LOG", "SECCOMP_FILTER_FLAG_SPEC_ALLOW"];
        let filter = of(json!({"defaultAction": "SCMP_ACT_ERRNO", "flags": flags}), &[0; 8]).unwrap();
        assert_eq!(filter.map(|filter| filter.flags), Some(6));
    }
}
