//! Compiles seccomp profiles to BPF programs.
//!
//! libseccomp needs 10 ms and more for the default profile. So a profile is compiled once here, and not in every container
//! and exec. Pure, except for the cache.

use std::collections::VecDeque;
use std::io::{Read, Seek};
use std::sync::{Arc, Mutex, PoisonError};

use libseccomp::error::SeccompError;
use libseccomp::{ScmpAction, ScmpArgCompare, ScmpCompareOp, ScmpFilterContext, ScmpSyscall};
use nix::sys::memfd::{MFdFlags, memfd_create};
use oci_spec::runtime::{
    Arch, LinuxSeccomp, LinuxSeccompAction, LinuxSeccompArg, LinuxSeccompOperator, LinuxSyscall,
};
use sha2::{Digest, Sha256};

mod architecture;
mod newer;

use self::architecture::architecture;
use self::newer::Decision;

/// Capacity of the cache: the default profile for several capability sets, and a few profiles of the machine.
const CACHE_CAPACITY: usize = 8;
/// Maximum instructions of a program (`BPF_MAXINSNS`).
const MAX_INSTRUCTIONS: usize = 4096;
/// libseccomp's binary tree: about ten comparisons per call instead of one for each call in the profile.
const BINARY_TREE: u32 = 2;

/// A program of `struct sock_filter` instructions, in native byte order.
pub(crate) type Program = Arc<[u8]>;

/// Reasons why a profile cannot be compiled.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FilterError {
    #[error("cannot be parsed by libseccomp: {0}")]
    Library(#[from] SeccompError),
    #[error("cannot be exported")]
    Export(#[source] std::io::Error),
    #[error("cannot be encoded")]
    Encode(#[from] serde_json::Error),
    #[error("has errno {0}, which is out of range")]
    Errno(u32),
    #[error("needs {0} instructions; the kernel's maximum is {MAX_INSTRUCTIONS}")]
    TooLong(usize),
    #[error("was not compiled: the runtime is shutting down")]
    Stopped,
}

/// Cache of compiled profiles, most recently used first.
#[derive(Default)]
pub(crate) struct Filters(Mutex<VecDeque<([u8; 32], Program)>>);

// === impl Filters ===

impl Filters {
    /// The program of a profile. A profile that is not in the cache is compiled on a blocking thread.
    ///
    /// # Errors
    /// If libseccomp refuses the profile, or its program is too long.
    pub(crate) async fn program(&self, profile: &LinuxSeccomp) -> Result<Program, FilterError> {
        let key: [u8; 32] = Sha256::digest(serde_json::to_vec(profile)?).into();
        if let Some(known) = self.recent(&key) {
            return Ok(known);
        }
        let profile = profile.clone();
        let compiled = coracle_threads::spawn_blocking(move || compile(&profile)).await;
        let program: Program = compiled.map_err(|_panicked| FilterError::Stopped)??.into();
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push_front((key, program.clone()));
        kept.truncate(CACHE_CAPACITY);
        Ok(program)
    }

    fn recent(&self, key: &[u8; 32]) -> Option<Program> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = kept.iter().position(|(known, _)| known == key)?;
        let entry = kept.remove(at)?;
        let program = entry.1.clone();
        kept.push_front(entry);
        Some(program)
    }
}

/// The number of a system call.
enum Number {
    /// A call that libseccomp supports.
    Known(ScmpSyscall),
    /// A call that is newer than libseccomp. Its number is the same on every architecture.
    Newer(u32),
}

/// Accepts any bytes: a valid profile compiles to whole instructions.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    let Ok(profile) = serde_json::from_slice::<LinuxSeccomp>(data) else { return };
    let program = compile(&profile).unwrap_or_default();
    assert!(program.len().is_multiple_of(newer::INSTRUCTION));
}

fn compile(profile: &LinuxSeccomp) -> Result<Vec<u8>, FilterError> {
    let default = action(profile.default_action(), profile.default_errno_ret())?;
    let mut context = ScmpFilterContext::new(default)?;
    let architectures: Vec<Arch> = profile.architectures().iter().flatten().copied().collect();
    for of in &architectures {
        context.add_arch(architecture(*of))?;
    }
    context.set_ctl_optimize(BINARY_TREE)?;
    let (mut newer, mut requests) = (Vec::new(), Vec::new());
    for call in profile.syscalls().iter().flatten() {
        let action = action(call.action(), call.errno_ret())?;
        // libseccomp refuses a rule with the default action.
        if action == default {
            continue;
        }
        if let Some(request) = refused_request(call).filter(|_| requests.len() < newer::MAX_REQUESTS) {
            requests.push(Decision { value: request, action });
            continue;
        }
        for name in call.names() {
            match number(name) {
                Some(Number::Known(known)) => add(&mut context, action, known, call)?,
                // libseccomp cannot compare arguments of such a call. Without a rule the program answers ENOSYS.
                Some(Number::Newer(number)) if call.args().iter().flatten().next().is_none() => {
                    newer.push(Decision { value: number, action });
                }
                // As in runc: a call that this architecture does not have is ignored.
                Some(Number::Newer(_)) | None => {}
            }
        }
    }
    let mut program = newer::prefix(profile, &architectures, &newer, &requests);
    program.extend(export(&context)?);
    match program.len() / newer::INSTRUCTION {
        long if long > MAX_INSTRUCTIONS => Err(FilterError::TooLong(long)),
        _ => Ok(program),
    }
}

fn number(name: &str) -> Option<Number> {
    match ScmpSyscall::from_name(name) {
        Ok(known) => Some(Number::Known(known)),
        Err(_unknown) => newer::number(name).map(Number::Newer),
    }
}

/// The `ioctl` request that a rule refuses. If another rule allows `ioctl` without conditions, libseccomp ignores the
/// refusal.
fn refused_request(call: &LinuxSyscall) -> Option<u32> {
    let [condition] = call.args().as_deref()? else { return None };
    let is_ioctl = matches!(call.names().as_slice(), [name] if name == "ioctl");
    let is_request = condition.index() == 1
        && condition.op() == LinuxSeccompOperator::ScmpCmpMaskedEq
        && condition.value() == u64::from(u32::MAX);
    let request = u32::try_from(condition.value_two()?).ok()?;
    (is_ioctl && is_request && call.action() == LinuxSeccompAction::ScmpActErrno).then_some(request)
}

/// Adds the rules of one call. libseccomp does not combine two conditions on one argument. So each condition becomes a
/// rule of its own, as in runc.
fn add(
    context: &mut ScmpFilterContext,
    action: ScmpAction,
    number: ScmpSyscall,
    call: &LinuxSyscall,
) -> Result<(), FilterError> {
    let conditions = call.args().as_deref().unwrap_or_default();
    let compared: Vec<ScmpArgCompare> = conditions.iter().map(comparison).collect();
    let mut arguments: Vec<usize> = conditions.iter().map(LinuxSeccompArg::index).collect();
    arguments.sort_unstable();
    let twice = arguments.windows(2).any(|pair| pair[0] == pair[1]);
    match compared.as_slice() {
        [] => context.add_rule(action, number).map(drop)?,
        all if !twice => context.add_rule_conditional(action, number, all).map(drop)?,
        all => {
            for one in all {
                context.add_rule_conditional(action, number, std::slice::from_ref(one))?;
            }
        }
    }
    Ok(())
}

fn comparison(argument: &LinuxSeccompArg) -> ScmpArgCompare {
    let by = match argument.op() {
        LinuxSeccompOperator::ScmpCmpNe => ScmpCompareOp::NotEqual,
        LinuxSeccompOperator::ScmpCmpLt => ScmpCompareOp::Less,
        LinuxSeccompOperator::ScmpCmpLe => ScmpCompareOp::LessOrEqual,
        LinuxSeccompOperator::ScmpCmpEq => ScmpCompareOp::Equal,
        LinuxSeccompOperator::ScmpCmpGe => ScmpCompareOp::GreaterEqual,
        LinuxSeccompOperator::ScmpCmpGt => ScmpCompareOp::Greater,
        LinuxSeccompOperator::ScmpCmpMaskedEq => {
            // The first value is the mask, the second the expected result.
            let wanted = argument.value_two().unwrap_or_default();
            return ScmpArgCompare::new(
                index(argument),
                ScmpCompareOp::MaskedEqual(argument.value()),
                wanted,
            );
        }
    };
    ScmpArgCompare::new(index(argument), by, argument.value())
}

/// Index of the argument. libseccomp refuses an index above 5.
fn index(argument: &LinuxSeccompArg) -> u32 {
    u32::try_from(argument.index()).unwrap_or(u32::MAX)
}

fn action(of: LinuxSeccompAction, errno: Option<u32>) -> Result<ScmpAction, FilterError> {
    let errno = errno.unwrap_or(libc::EPERM.cast_unsigned());
    let small = u16::try_from(errno).map_err(|_too_large| FilterError::Errno(errno));
    Ok(match of {
        LinuxSeccompAction::ScmpActKill | LinuxSeccompAction::ScmpActKillThread => ScmpAction::KillThread,
        LinuxSeccompAction::ScmpActKillProcess => ScmpAction::KillProcess,
        LinuxSeccompAction::ScmpActTrap => ScmpAction::Trap,
        LinuxSeccompAction::ScmpActErrno => ScmpAction::Errno(small?.into()),
        LinuxSeccompAction::ScmpActTrace => ScmpAction::Trace(small?),
        LinuxSeccompAction::ScmpActAllow => ScmpAction::Allow,
        LinuxSeccompAction::ScmpActNotify => ScmpAction::Notify,
        LinuxSeccompAction::ScmpActLog => ScmpAction::Log,
    })
}

fn export(context: &ScmpFilterContext) -> Result<Vec<u8>, FilterError> {
    let failed = FilterError::Export;
    let memory = memfd_create(c"seccomp", MFdFlags::MFD_CLOEXEC).map_err(|error| failed(error.into()))?;
    context.export_bpf(&memory)?;
    let mut file = std::fs::File::from(memory);
    let mut program = Vec::new();
    file.rewind().and_then(|()| file.read_to_end(&mut program)).map_err(failed)?;
    Ok(program)
}

#[cfg(test)]
mod tests;
