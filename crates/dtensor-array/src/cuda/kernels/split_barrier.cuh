// A barrier of warps between `arrive` and `await`. Phases have parities 0, 1, 0 and so on.
struct SplitBarrier {
    u64 state;
#ifdef EMULATED
    // The warps that have still to arrive, and all of them; the parity of the phase that is not complete.
    struct State {
        unsigned short left, all;
        u32 parity;
    };
    DEVICE void init(u32 warps) { *(State*)this = State{(unsigned short)warps, (unsigned short)warps, 0}; }
    DEVICE void arrive() {
        __syncwarp();
        State& s = *(State*)this;
        if (lane() == 0 && --s.left == 0) s = State{s.all, s.all, s.parity ^ 1};
    }
    DEVICE void await(u32 parity) {
        while (((volatile State*)this)->parity == parity) emulator::yield();
    }
#else
    DEVICE u32 address() { return (u32)__cvta_generic_to_shared(this); }
    DEVICE void init(u32 warps) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" : : "r"(address()), "r"(warps) : "memory"); }
    DEVICE void arrive() {
        __syncwarp();
        if (lane() == 0) asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" : : "r"(address()) : "memory");
    }
    DEVICE void await(u32 parity) {
        u32 is_complete;
        do {
            asm volatile(
                "{ .reg .pred p; "
#if __CUDA_ARCH__ >= 900
                "mbarrier.try_wait.parity.shared.b64 p, [%1], %2; "
#else
                "mbarrier.test_wait.parity.shared.b64 p, [%1], %2; "
#endif
                "selp.b32 %0, 1, 0, p; }"
                : "=r"(is_complete)
                : "r"(address()), "r"(parity)
                : "memory");
        } while (!is_complete);
    }
#endif
};
