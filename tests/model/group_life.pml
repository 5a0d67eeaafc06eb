/* SPDX-License-Identifier: Apache-2.0
 *
 * The life of a process group around a background save, for spin: in every order the main thread of each rank destroys
 * its groups, begins a new world in which it is alone, or dies, while the save of each rank goes from exchange to
 * exchange in a thread of its own. test_group_life_model.py runs this file.
 *
 *   RANKS    that save together
 *   SHARDED  1: a tensor is sharded over all ranks, and the check of coverage sees who lacks; 0: what ranks hold is
 *            replicated, but for one object of each rank, which no check can miss
 *   ASTRAY   1: the last rank calls as if it were alone (no_dist, or a group of itself)
 *   TOGETHER 1: messages of a save end with the registry of groups: a destroyed group loses its ranks (a group of
 *            torch that is used by its functions); 0: they go over the group itself (distributed/collectives.py)
 *   M_ASK_LATE     a mutation: the thread of the save asks which ranks there are when it begins
 *   M_NO_COVERAGE  a mutation: nobody looks whether the chunks of a tensor tile it
 *   M_NOT_ALL      a mutation: the coordinator commits what has come when a rank is lost
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef SHARDED
#define SHARDED 1
#endif
#ifndef ASTRAY
#define ASTRAY 0
#endif
#ifndef TOGETHER
#define TOGETHER 0
#endif

#define BIT(r) (1 << (r))
#define HAS(set, r) (((set) >> (r)) & 1)
#define ALL ((1 << RANKS) - 1)

/* Properties by number, so that a failure says which. */
#define MUST(property, x) assert((x) || (property) == 0)
#define WHOLE 1 /* what is committed has every element of every tensor */
#define KEPT 2  /* and what each rank of the call gave to it */
#define TOLD 3  /* who is told that its save is committed has all of it in the checkpoint */
#define LIVE 4  /* where no rank dies, no group is lost and all call alike, all are told so */

/* Of the main thread of a rank. */
#define CALLED 0
#define GONE 1  /* its groups are destroyed */
#define ALONE 2 /* and it is in a world of its own */
#define DEAD 3
byte life[RANKS];
bool lost; /* a rank has died, or a group was lost with its registry */

/* Of the save of a rank. */
#define WAITS 0
#define PLANNED 1
#define WRITTEN 2
#define DONE 3
#define FAILED 4
byte stage[RANKS];
byte believes[RANKS]; /* ranks that save together, as it believes; 0 before it begins */
byte planned[RANKS];  /* at a coordinator: whose plans it has */
byte decided[RANKS];  /* at a coordinator: PLANNED, then DONE or FAILED, as it tells the others */

byte mark = ALL; /* whose parts the checkpoint has; the one before had all */

#if ASTRAY
#define CALL(r) (r == RANKS - 1 -> BIT(r) : ALL & ~BIT(RANKS - 1))
#else
#define CALL(r) ALL
#endif

#define COORDINATOR(set) (HAS(set, 0) -> 0 : (HAS(set, 1) -> 1 : 2))
#if TOGETHER
#define IS_LOST(m) (life[m] != CALLED)
#else
#define IS_LOST(m) (life[m] == DEAD)
#endif
/* `m` will not come to the exchange at `s`, of those who believe in `set`. */
#define NEVER(m, set, s) (IS_LOST(m) || stage[m] == FAILED || (believes[m] != 0 && believes[m] != set))
#define CAME(m, set, s) (believes[m] == set && stage[m] >= s && stage[m] != FAILED)

inline wait_for_all(r, s) {
  m = 0;
  do
  :: m == RANKS -> break
  :: m < RANKS && !HAS(believes[r], m) -> m++
  :: m < RANKS && HAS(believes[r], m) && CAME(m, believes[r], s) -> d_step { came = came | BIT(m); m++ }
  :: m < RANKS && HAS(believes[r], m) && !CAME(m, believes[r], s) && NEVER(m, believes[r], s) -> m++
  od;
  m = 0
}

#define FAIL(r) atomic { decided[r] = FAILED; stage[r] = FAILED; goto over }

proctype Save(byte r) {
  byte m, c, came;
  /* The thread begins whenever it is its turn. */
  atomic {
    if
    :: life[r] == DEAD -> goto over
    :: else
    fi;
#if defined(M_ASK_LATE)
    believes[r] = (life[r] == CALLED -> CALL(r) : BIT(r))
#else
    believes[r] = CALL(r)
#endif
    c = COORDINATOR(believes[r]);
    stage[r] = PLANNED
  }
  if
  :: c == r ->
    wait_for_all(r, PLANNED);
    if
    :: life[r] == DEAD -> goto over
#if !defined(M_NOT_ALL)
    :: life[r] != DEAD && came != believes[r] -> FAIL(r)
#endif
#if SHARDED && !defined(M_NO_COVERAGE)
    :: life[r] != DEAD && came != ALL -> FAIL(r)
#endif
    :: else
    fi;
    planned[r] = came; came = 0;
    decided[r] = PLANNED
  :: else ->
    if
    :: decided[c] != WAITS && HAS(planned[c], r)
    :: decided[c] == FAILED || NEVER(c, believes[r], PLANNED) -> atomic { stage[r] = FAILED; goto over }
    :: life[r] == DEAD -> goto over
    fi
  fi;
  /* Each writes its part. */
  atomic {
    if
    :: life[r] == DEAD -> goto over
    :: else -> stage[r] = WRITTEN
    fi
  }
  if
  :: c == r ->
    wait_for_all(r, WRITTEN);
    atomic {
      if
      :: life[r] == DEAD -> goto over
#if !defined(M_NOT_ALL)
      :: life[r] != DEAD && came != planned[r] -> decided[r] = FAILED; stage[r] = FAILED; goto over
#endif
      :: else
      fi;
      mark = came;
      MUST(WHOLE, !SHARDED || mark == ALL);
      MUST(KEPT, ASTRAY || mark == ALL);
      decided[r] = DONE; stage[r] = DONE
    }
  :: else ->
    if
    :: decided[c] == DONE -> atomic { MUST(TOLD, HAS(mark, r)); stage[r] = DONE }
    :: decided[c] != DONE && (decided[c] == FAILED || NEVER(c, believes[r], WRITTEN)) -> stage[r] = FAILED
    :: life[r] == DEAD
    fi
  fi;
over:
  MUST(LIVE, stage[r] == DONE || lost || ASTRAY)
}

proctype Main(byte r) {
  if
  :: atomic { life[r] = GONE; lost = lost || TOGETHER }
     if
     :: life[r] = ALONE
     :: skip
     fi
  :: skip
  fi;
  if
  :: atomic { life[r] = DEAD; lost = true }
  :: skip
  fi
}

init {
  atomic {
    byte n = 0;
    do
    :: n < RANKS -> run Main(n); run Save(n); n++
    :: else -> break
    od
  }
}
