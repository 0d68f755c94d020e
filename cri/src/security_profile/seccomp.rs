//! The default seccomp profile as data: containerd's list of system calls, and the calls that the container's
//! capabilities allow. Without CAP_SYS_ADMIN, requests that change the project id of a file are refused. Pure.

use coracle_proto::cri::SecurityProfile;
use coracle_proto::cri::security_profile::ProfileType;
use oci_spec::OciSpecError;
use oci_spec::runtime::{
    Arch, LinuxSeccomp, LinuxSeccompAction, LinuxSeccompArg, LinuxSeccompArgBuilder, LinuxSeccompOperator,
    LinuxSyscall,
};

/// System calls that every container may use.
const ALLOWED: &str = "accept accept4 access adjtimex alarm bind brk cachestat capget capset chdir chmod chown chown32 \
     clock_adjtime clock_adjtime64 clock_getres clock_getres_time64 clock_gettime clock_gettime64 \
     clock_nanosleep clock_nanosleep_time64 close close_range connect copy_file_range creat dup dup2 \
     dup3 epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait \
     epoll_wait_old eventfd eventfd2 execve execveat exit exit_group faccessat faccessat2 fadvise64 \
     fadvise64_64 fallocate fanotify_mark fchdir fchmod fchmodat fchmodat2 fchown fchown32 fchownat \
     fcntl fcntl64 fdatasync fgetxattr flistxattr flock fork fremovexattr fsetxattr fstat fstat64 \
     fstatat64 fstatfs fstatfs64 fsync ftruncate ftruncate64 futex futex_requeue futex_time64 \
     futex_wait futex_waitv futex_wake futimesat getcpu getcwd getdents getdents64 getegid getegid32 \
     geteuid geteuid32 getgid getgid32 getgroups getgroups32 getitimer getpeername getpgid getpgrp \
     getpid getppid getpriority getrandom getresgid getresgid32 getresuid getresuid32 getrlimit \
     get_robust_list getrusage getsid getsockname getsockopt get_thread_area gettid gettimeofday \
     getuid getuid32 getxattr getxattrat inotify_add_watch inotify_init inotify_init1 \
     inotify_rm_watch io_cancel ioctl io_destroy io_getevents io_pgetevents io_pgetevents_time64 \
     ioprio_get ioprio_set io_setup io_submit ipc kill landlock_add_rule landlock_create_ruleset \
     landlock_restrict_self lchown lchown32 lgetxattr link linkat listen listmount listxattr \
     listxattrat llistxattr _llseek lremovexattr lseek lsetxattr lsm_get_self_attr lsm_list_modules \
     lsm_set_self_attr lstat lstat64 madvise membarrier memfd_create memfd_secret mincore mkdir \
     mkdirat mknod mknodat mlock mlock2 mlockall map_shadow_stack mmap mmap2 mprotect mq_getsetattr \
     mq_notify mq_open mq_timedreceive mq_timedreceive_time64 mq_timedsend mq_timedsend_time64 \
     mq_unlink mremap mseal msgctl msgget msgrcv msgsnd msync munlock munlockall munmap \
     name_to_handle_at nanosleep newfstatat _newselect open openat openat2 pause pidfd_open \
     pidfd_send_signal pipe pipe2 pkey_alloc pkey_free pkey_mprotect poll ppoll ppoll_time64 prctl \
     pread64 preadv preadv2 prlimit64 process_mrelease pselect6 pselect6_time64 pwrite64 pwritev \
     pwritev2 read readahead readlink readlinkat readv recv recvfrom recvmmsg recvmmsg_time64 recvmsg \
     remap_file_pages removexattr removexattrat rename renameat renameat2 restart_syscall rmdir rseq \
     rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend \
     rt_sigtimedwait rt_sigtimedwait_time64 rt_tgsigqueueinfo sched_getaffinity sched_getattr \
     sched_getparam sched_get_priority_max sched_get_priority_min sched_getscheduler \
     sched_rr_get_interval sched_rr_get_interval_time64 sched_setaffinity sched_setattr \
     sched_setparam sched_setscheduler sched_yield seccomp select semctl semget semop semtimedop \
     semtimedop_time64 send sendfile sendfile64 sendmmsg sendmsg sendto setfsgid setfsgid32 setfsuid \
     setfsuid32 setgid setgid32 setgroups setgroups32 setitimer setpgid setpriority setregid \
     setregid32 setresgid setresgid32 setresuid setresuid32 setreuid setreuid32 setrlimit \
     set_robust_list setsid setsockopt set_thread_area set_tid_address setuid setuid32 setxattr \
     setxattrat shmat shmctl shmdt shmget shutdown sigaltstack signalfd signalfd4 sigprocmask \
     sigreturn socketcall socketpair splice stat stat64 statfs statfs64 statmount statx symlink \
     symlinkat sync sync_file_range syncfs sysinfo tee tgkill time timer_create timer_delete \
     timer_getoverrun timer_gettime timer_gettime64 timer_settime timer_settime64 timerfd_create \
     timerfd_gettime timerfd_gettime64 timerfd_settime timerfd_settime64 times tkill truncate \
     truncate64 ugetrlimit umask uname unlink unlinkat uretprobe utime utimensat utimensat_time64 \
     utimes vfork vmsplice wait4 waitid waitpid write writev";

/// Calls for tracing. A tracer cannot bypass the filter since Linux 4.8, and all supported kernels are later.
const TRACING: &str = "process_vm_readv process_vm_writev ptrace";

/// System calls that a capability allows.
const BY_CAPABILITY: [(&str, &str); 14] = [
    ("CAP_BPF", "bpf"),
    ("CAP_DAC_READ_SEARCH", "open_by_handle_at"),
    ("CAP_PERFMON", "perf_event_open"),
    (
        "CAP_SYS_ADMIN",
        "bpf clone clone3 fanotify_init fsconfig fsmount fsopen fspick lookup_dcookie mount mount_setattr \
         move_mount open_tree perf_event_open quotactl quotactl_fd setdomainname sethostname setns syslog \
         umount umount2 unshare",
    ),
    ("CAP_SYS_BOOT", "reboot"),
    ("CAP_SYS_CHROOT", "chroot"),
    ("CAP_SYS_MODULE", "delete_module init_module finit_module"),
    ("CAP_SYS_NICE", "get_mempolicy mbind set_mempolicy set_mempolicy_home_node"),
    ("CAP_SYS_PACCT", "acct"),
    ("CAP_SYS_PTRACE", "kcmp pidfd_getfd process_madvise"),
    ("CAP_SYS_RAWIO", "iopl ioperm"),
    ("CAP_SYS_TIME", "settimeofday stime clock_settime clock_settime64"),
    ("CAP_SYS_TTY_CONFIG", "vhangup"),
    ("CAP_SYSLOG", "syslog"),
];

/// Allowed arguments of `personality`: `PER_LINUX` and `PER_LINUX32`, each with and without `UNAME26`, and the query of
/// the current value. The kernel uses the lower half only. A query by a program that passes -1 has all bits.
const PERSONALITIES: [u64; 5] = [0x0, 0x0008, 0x2_0000, 0x2_0008, 0xffff_ffff];

/// All namespace flags of `clone`.
const CLONE_NAMESPACES: u64 = 0x7e02_0000;

/// Allowed address families of `socket`, as masks and values of the first argument: all families below 64 except AF_ALG
/// (38) and AF_VSOCK (40). The kernel has fewer than 64 families, and uses only the lower half of the argument. So the
/// masks leave the upper half out: comparisons of the whole argument would allow AF_ALG with a bit in the upper half.
/// libseccomp combines conditions on one argument by "or", so it cannot exclude two values.
const SOCKETS: [(u64, u64); 8] = [
    (0xffff_ffe0, 0),
    (0xffff_fffc, 32),
    (0xffff_fffe, 36),
    (0xffff_ffff, 39),
    (0xffff_ffff, 41),
    (0xffff_fffe, 42),
    (0xffff_fffc, 44),
    (0xffff_fff0, 48),
];

const ENOSYS: u32 = 38;
const ENOTTY: u32 = 25;

/// Requests of `ioctl` that change the project id of files: `FS_IOC_FSSETXATTR`, `FS_IOC_SETFLAGS` and
/// `FS_IOC32_SETFLAGS`. Outside of a user namespace, the kernel allows these requests to the owner of a file, so the
/// owner could evade the quota of a volume. Programs handle the error `ENOTTY`, because many file systems do not have
/// these requests.
const PROJECT_REQUESTS: [u64; 3] = [0x401c_5820, 0x4008_6602, 0x4004_6602];

/// The default profile for a container that keeps `capabilities`.
pub(crate) fn default_profile(capabilities: &[String]) -> Result<LinuxSeccomp, OciSpecError> {
    let admin = capabilities.iter().any(|name| name == "CAP_SYS_ADMIN");
    let mut names: Vec<String> = [ALLOWED, TRACING, arch_calls()]
        .into_iter()
        .chain(
            BY_CAPABILITY
                .iter()
                .filter(|(capability, _)| capabilities.iter().any(|name| name == capability))
                .map(|(_, calls)| *calls),
        )
        .flat_map(str::split_whitespace)
        .map(str::to_owned)
        .collect();
    names.sort_unstable();
    names.dedup();
    let mut calls = vec![allow(names, None)];
    for (mask, value) in SOCKETS {
        calls.push(allow(vec!["socket".to_owned()], Some(masked(0, mask, value)?)));
    }
    for value in PERSONALITIES {
        let equal = masked(0, u32::MAX.into(), value)?;
        calls.push(allow(vec!["personality".to_owned()], Some(equal)));
    }
    if !admin {
        let index = usize::from(cfg!(target_arch = "s390x"));
        let flags = masked(index, CLONE_NAMESPACES, 0)?;
        calls.push(allow(vec!["clone".to_owned()], Some(flags)));
        // The flags of clone3 are behind a pointer, which a filter cannot read: ENOSYS makes libraries fall back to clone.
        let mut clone3 = LinuxSyscall::default();
        clone3.set_names(vec!["clone3".to_owned()]);
        clone3.set_action(LinuxSeccompAction::ScmpActErrno);
        clone3.set_errno_ret(Some(ENOSYS));
        calls.push(clone3);
        for request in PROJECT_REQUESTS {
            calls.push(refuse_request(request)?);
        }
    }
    let mut profile = LinuxSeccomp::default();
    profile.set_default_action(LinuxSeccompAction::ScmpActErrno);
    profile.set_architectures(Some(architectures()));
    profile.set_syscalls(Some(calls));
    Ok(profile)
}

fn allow(names: Vec<String>, argument: Option<LinuxSeccompArg>) -> LinuxSyscall {
    let mut call = LinuxSyscall::default();
    call.set_names(names);
    call.set_action(LinuxSeccompAction::ScmpActAllow);
    call.set_args(argument.map(|argument| vec![argument]));
    call
}

/// A rule that refuses a request of `ioctl`. The kernel uses the lower half of the argument only.
fn refuse_request(request: u64) -> Result<LinuxSyscall, OciSpecError> {
    let argument = masked(1, u32::MAX.into(), request)?;
    let mut call = LinuxSyscall::default();
    call.set_names(vec!["ioctl".to_owned()]);
    call.set_action(LinuxSeccompAction::ScmpActErrno);
    call.set_errno_ret(Some(ENOTTY));
    call.set_args(Some(vec![argument]));
    Ok(call)
}

/// The condition that the masked bits of an argument have this value. All conditions of the profile are such conditions:
/// the kernel ignores the upper half of these arguments, and libseccomp's other comparisons include it.
fn masked(index: usize, mask: u64, value: u64) -> Result<LinuxSeccompArg, OciSpecError> {
    let op = LinuxSeccompOperator::ScmpCmpMaskedEq;
    LinuxSeccompArgBuilder::default().index(index).value(mask).value_two(value).op(op).build()
}

fn architectures() -> Vec<Arch> {
    if cfg!(target_arch = "x86_64") {
        vec![Arch::ScmpArchX86_64, Arch::ScmpArchX86, Arch::ScmpArchX32]
    } else if cfg!(target_arch = "aarch64") {
        vec![Arch::ScmpArchAarch64, Arch::ScmpArchArm]
    } else if cfg!(target_arch = "riscv64") {
        vec![Arch::ScmpArchRiscv64]
    } else if cfg!(target_arch = "arm") {
        vec![Arch::ScmpArchArm]
    } else {
        Vec::new()
    }
}

fn arch_calls() -> &'static str {
    if cfg!(target_arch = "x86_64") {
        "arch_prctl modify_ldt"
    } else if cfg!(any(target_arch = "aarch64", target_arch = "arm")) {
        "arm_fadvise64_64 arm_sync_file_range sync_file_range2 breakpoint cacheflush set_tls"
    } else if cfg!(target_arch = "riscv64") {
        "riscv_flush_icache riscv_hwprobe"
    } else {
        ""
    }
}

/// Converts the deprecated profile path. `None` if the path is empty.
pub(crate) fn of_path(path: &str) -> Result<Option<SecurityProfile>, String> {
    let (kind, file) = match path {
        "" => return Ok(None),
        "unconfined" => (ProfileType::Unconfined, ""),
        "runtime/default" | "docker/default" => (ProfileType::RuntimeDefault, ""),
        path => match path.strip_prefix("localhost/") {
            Some(file) => (ProfileType::Localhost, file),
            None => {
                return Err(format!(
                    "invalid seccomp profile {path:?}: use unconfined, runtime/default or localhost/PATH"
                ));
            }
        },
    };
    Ok(Some(SecurityProfile { profile_type: kind.into(), localhost_ref: file.to_owned() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(profile: &LinuxSeccomp, name: &str) -> bool {
        profile.syscalls().iter().flatten().any(|call| {
            call.action() == LinuxSeccompAction::ScmpActAllow
                && call.args().is_none()
                && call.names().iter().any(|known| known == name)
        })
    }

    #[test]
    fn a_deprecated_profile_path_is_converted_or_refused() {
        let of =
            |path| of_path(path).expect("a profile").map(|found| (found.profile_type(), found.localhost_ref));
        assert_eq!(of(""), None);
        assert_eq!(of("unconfined"), Some((ProfileType::Unconfined, String::new())));
        assert_eq!(of("runtime/default"), Some((ProfileType::RuntimeDefault, String::new())));
        assert_eq!(of("localhost//p.json"), Some((ProfileType::Localhost, "/p.json".to_owned())));
        assert!(of_path("/p.json").expect_err("no prefix").contains("/p.json"));
    }

    #[test]
    fn capabilities_extend_the_default() {
        let plain = default_profile(&[]).expect("profile");
        assert!(allowed(&plain, "read") && allowed(&plain, "execve") && allowed(&plain, "arch_prctl"));
        for refused in ["mount", "reboot", "keyctl", "clone3", "unshare", "socket"] {
            assert!(!allowed(&plain, refused), "{refused}");
        }
        let admin = default_profile(&["CAP_SYS_ADMIN".to_owned()]).expect("profile");
        assert!(allowed(&admin, "mount") && allowed(&admin, "clone3"));
    }
}
